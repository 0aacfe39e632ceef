"""Classes in a store: covered by digests, within the number of its classes; and stores of captions are unchanged."""

import pytest
import torch
from stores import Caption, make_store, read_rows

from bigdit.errors import UserError
from bigdit.store import FeatureStore
from bigdit.store.part import EncodedRange, part_path, write_part
from bigdit.store.reader import Part
from bigdit.store.schema import Classes, StoreSchema, claim, part_identity, read_schema, schema_text, store_identity
from bigdit.store.text import Text

SHAPE = (4, 2, 2)
SCHEMA = StoreSchema(
    codec={},
    text_encoder={},
    buckets=[(8, 8)],
    sources=[{"kind": "random", "count": 3}],
    part_size=3,
    classes=["a", "b"],
)


def written(root, labels, schema=SCHEMA):
    """The only part of a store with these classes."""
    root.mkdir()
    claim(root, schema)
    encoded = EncodedRange({SHAPE: torch.randn(3, *SHAPE)}, {SHAPE: [0, 1, 2]}, {}, {}, [], dict(enumerate(labels)))
    file = part_path(root, 0, 3)
    write_part(file, encoded, identity=part_identity(schema, 0))
    return file


def test_labels_are_read_as_they_were_written(tmp_path):
    file = written(tmp_path / "store", [1, 0, 1])
    assert Part.open(file).labels[SHAPE].tolist() == [1, 0, 1]
    store = FeatureStore.open(tmp_path / "store")
    assert (store.schema.classes, store.classes.count, store.text_shape) == (["a", "b"], 2, None)
    latents, texts, indices = read_rows(store, SHAPE, [2, 0])
    assert (latents.shape, texts, indices) == ((2, *SHAPE), [], [2, 0])
    assert not list(Part.open(file).damages())


def test_every_flipped_bit_of_the_labels_is_found(tmp_path):
    file = written(tmp_path / "store", [1, 0, 1])
    data = file.read_bytes()
    column = Part.open(file).header.columns[f"label/{'x'.join(map(str, SHAPE))}"]
    assert (column.shape, column.dtype) == ((3,), torch.int64)
    for bit in range(8 * column.nbytes):
        damaged = bytearray(data)
        damaged[column.offset + bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged in its header or tables: the digest differs"):
            Part.open(file)


@pytest.mark.parametrize("label", [2, -1])
def test_labels_beyond_the_classes_are_refused(tmp_path, label):
    written(tmp_path / "store", [1, label, 0])
    with pytest.raises(UserError, match="is damaged"):
        FeatureStore.open(tmp_path / "store").part(0)


def test_a_part_of_captions_is_none_of_a_store_of_classes(tmp_path):
    file = written(tmp_path / "store", [0, 0, 0])
    texts = {"x": Text(torch.randn(1, 4))}
    encoded = EncodedRange(
        {SHAPE: torch.randn(3, *SHAPE)}, {SHAPE: [0, 1, 2]}, dict.fromkeys(range(3), (Caption("x"),)), texts, []
    )
    write_part(file, encoded, identity=part_identity(SCHEMA, 0))
    with pytest.raises(UserError, match="has no labels, unlike its store"):
        FeatureStore.open(tmp_path / "store").part(0)


def test_classes_are_part_of_a_store_s_identity(tmp_path):
    make_store(tmp_path / "store", 8)
    schema = read_schema(tmp_path / "store")
    with_classes = schema.model_copy(update={"classes": 10})
    assert store_identity(with_classes) != store_identity(schema)
    assert '"classes": 10' in schema_text(with_classes)


def test_other_classes_are_another_store(tmp_path):
    written(tmp_path / "store", [0, 0, 0])
    with pytest.raises(UserError, match=r"classes\[1\] is 'b' there and 'c' in this run"):
        claim(tmp_path / "store", SCHEMA.model_copy(update={"classes": ["a", "c"]}))
    with pytest.raises(UserError, match=r"classes is \['a', 'b'\] there and 10 in this run"):
        claim(tmp_path / "store", SCHEMA.model_copy(update={"classes": 10}))


def test_a_class_is_known_by_its_name_or_its_number():
    named, numbered = Classes(["10", "9", "cat"]), Classes(3)
    assert [named.number(label) for label in ("10", "9", "cat", 1, "0")] == [0, 1, 2, 1, 0]
    assert [numbered.number(label) for label in (0, "2")] == [0, 2]
    for classes, label, known in (
        (named, "ca", "did you mean cat?"),
        (numbered, 3, "known: 0 to 2"),
        (numbered, -1, "known"),
    ):
        with pytest.raises(UserError, match=rf"there is no class '{label}'; {known}"):
            classes.number(label)
