"""Several texts of a caption in a store: what is read back, that a digest covers every bit, and parts that do not
belong."""

from dataclasses import replace

import pytest
import torch
from stores import DIM, NULL, PART, STREAMS, Caption, damages, make_store, null_of_streams, read_rows

from bigdit.errors import UserError
from bigdit.extract.verify import verify
from bigdit.store import FeatureStore
from bigdit.store.part import EncodedRange, part_path, write_part
from bigdit.store.reader import Part
from bigdit.store.schema import part_identity, read_schema, store_identity
from bigdit.store.store import NULL_TEXT, read_null_text, write_null_text
from bigdit.store.text import Text

SHAPE = (4, 6, 6)


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store", PART, streams=True, pooled=True)
    return tmp_path / "store"


def rewritten(root, text):
    """The store's only part, with this text for all captions."""
    encoded = EncodedRange(
        {SHAPE: torch.zeros(1, *SHAPE, dtype=torch.bfloat16)}, {SHAPE: [0]}, {0: (Caption("a"),)}, {"a": text}, []
    )
    write_part(part_path(root, 0, PART), encoded, identity=part_identity(read_schema(root), 0))
    (root / "index.safetensors").unlink(missing_ok=True)


def same(one, other):
    assert (one.unmasked, one.streams.keys()) == (other.unmasked, other.streams.keys())
    assert torch.equal(one.states, other.states.bfloat16())
    for name, each in one.streams.items():
        same(each, other.streams[name])


def test_a_text_is_read_with_its_streams(tmp_path):
    truth = make_store(tmp_path / "store", PART, streams=True, several=True)
    part = Part.open(part_path(tmp_path / "store", 0, PART))
    assert part.streams == ["glyphs", "layers"]
    for shape, rows in part.rows.items():
        for row, (index, first, count, _) in enumerate(rows.tolist()):
            assert count == len(truth[index][1]) == 2
            for caption, expected in enumerate(truth[index][1]):
                same(part.text(first + caption), expected)
            assert part.choose_caption(shape, row, 0.0) == first
    store = FeatureStore.open(tmp_path / "store")
    _, texts, indices = read_rows(store, (4, 6, 6), [0])
    same(texts[0], truth[indices[0]][1][0])
    same(store.null_text, null_of_streams(Text(NULL.states)))
    moved = texts[0].to("cpu", torch.float32)
    assert (moved.nbytes, moved.shown) == (2 * texts[0].nbytes, texts[0].shown)


def test_a_flipped_bit_of_a_stream_is_found(root):
    path = part_path(root, 0, PART)
    columns, data = Part.open(path).header.columns, path.read_bytes()
    for name in ("stream/layers", "stream/glyphs", "text/layers", "text/glyphs", "caption"):
        start, nbytes = columns[name].offset, columns[name].nbytes
        for at in {start, start + nbytes // 3, start + nbytes - 1}:
            changed = bytearray(data)
            changed[at] ^= 1
            path.write_bytes(changed)
            assert damages(path), (name, at)
    assert [each.file for each in verify(root).damaged] == [path.name]  # their last one
    path.write_bytes(data)
    assert verify(root).damaged == []


def test_a_flipped_bit_of_the_empty_caption_is_found(root):
    identity, data = store_identity(read_schema(root)), (root / NULL_TEXT).read_bytes()
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 2
        (root / NULL_TEXT).write_bytes(changed)
        with pytest.raises(UserError, match="null_text"):
            read_null_text(root, identity)


def test_parts_with_other_streams_than_their_store_are_refused(root):
    whole = null_of_streams(NULL)
    rewritten(root, whole)
    assert FeatureStore.open(root).part(0).streams == ["glyphs", "layers"]
    rewritten(root, replace(whole, streams={"more": whole.streams["layers"]}))
    with pytest.raises(UserError, match="has other streams of text than its store: more instead of glyphs and layers"):
        FeatureStore.open(root).part(0)
    rewritten(root, Text(NULL.states))
    with pytest.raises(UserError, match="has other streams of text than its store: none instead of glyphs and layers"):
        FeatureStore.open(root).part(0)


def test_the_empty_caption_has_the_streams_of_its_store(root):
    (root / NULL_TEXT).unlink()
    write_null_text(root, lambda: NULL, store_identity(read_schema(root)))
    with pytest.raises(UserError, match=r"null_text\.safetensors has other streams than its store; delete it"):
        _ = FeatureStore.open(root).null_text


def test_a_stream_that_is_too_long_for_its_store_is_refused(root):
    whole = null_of_streams(NULL)
    longer = Text(torch.zeros(STREAMS["layers"]["max_tokens"] + 1, STREAMS["layers"]["dim"]))
    rewritten(root, replace(whole, streams=whole.streams | {"layers": longer}))
    store = FeatureStore.open(root)
    with pytest.raises(UserError, match="has a caption's layers of 4 × 10; the limit is 3 × 10"):
        store.part(0).check_fits(0, store.text_shapes)
    assert store.text_shapes["text"] == (12, DIM)
