"""The store: what is written is read back, and damage to its parts is found."""

import json
import math
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from stores import damages, read_rows

from bigdit.config.data import SourceConfig, VaeCodec
from bigdit.encoders.load import Encoders, load_image_codec
from bigdit.encoders.protocol import to_bytes, to_unit_range
from bigdit.errors import UserError
from bigdit.extract.verify import verify
from bigdit.extract.worker import UnitEncoder
from bigdit.sources.folder import ImageFolder
from bigdit.store import FeatureStore
from bigdit.store.header import read_header
from bigdit.store.part import part_path, write_part
from bigdit.store.reader import Part
from bigdit.store.report import Stopwatch, store_report
from bigdit.store.schema import claim, part_identity, store_identity
from bigdit.store.store import write_index, write_null_text

CAPTIONED = (*range(5), *range(6, 11))  # of the images


def flip_bit(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_every_sample_is_read_as_it_was_encoded(root, images, codec, text_encoder):
    store = FeatureStore.open(root)
    assert store.buckets == {(4, 4, 4): 6, (4, 4, 6): 4}
    seen = []
    for bucket, count in store.buckets.items():
        positions = list(range(count))[::-1]  # in any order, across parts
        latents, texts, indices = read_rows(store, bucket, positions)
        assert (latents.dtype, latents.shape) == (torch.float32, (count, *bucket))
        for sample, text, index in zip(latents, texts, indices, strict=True):
            pixels = to_bytes(codec.decode(sample[None]))[0, 0].numpy()
            assert np.array_equal(pixels, np.asarray(Image.open(images / f"{index:02d}.png")))
            expected = text_encoder.encode([f"number {index % 2}"])[0].states
            # bfloat16 keeps 8 bits of significance.
            assert torch.allclose(text.states.float(), expected, rtol=2**-7, atol=1e-4)
        seen += indices
    assert sorted(seen) == [*CAPTIONED]
    assert torch.equal(store.null_text.states, text_encoder.null().states.bfloat16())
    assert store.max_tokens == 20


def test_a_vaes_latents_are_kept_in_bfloat16(tmp_path, images, schema, text_encoder):
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    vae.save_pretrained(tmp_path / "vae")
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path / "vae"))
    root, items = tmp_path / "store", ImageFolder(SourceConfig(path=images)).items(0, 4)
    one_part = schema.model_copy(update={"codec": codec.identity, "sources": [{"count": 4}]})
    claim(root, one_part)
    write_null_text(root, text_encoder.null, store_identity(one_part))
    encoding = UnitEncoder(Encoders(codec, text_encoder, torch.device("cpu")), schema, Stopwatch())
    list(encoding.encode(items))
    write_part(part_path(root, 0, 4), encoding.encoded(), identity=part_identity(one_part, 0))
    store = FeatureStore.open(root)
    latents, _, indices = read_rows(store, (4, 8, 12), [1])
    pixels = torch.from_numpy(np.asarray(Image.open(items[3].path).convert("RGB")).copy()).permute(2, 0, 1)
    assert indices == [3]
    assert load_file(part_path(root, 0, 4))["latent/4x8x12"].dtype == torch.bfloat16
    # bfloat16 keeps 8 bits of significance; the batch of two that encoded it sums in another order.
    assert torch.allclose(latents[0].float(), codec.encode(to_unit_range(pixels[None]))[0], rtol=2**-7, atol=1e-4)


def test_a_part_is_plain_safetensors_with_each_caption_once(root):
    part = load_file(part_path(root, 4, 8))
    assert {name: tuple(tensor.shape) for name, tensor in part.items() if name != "captions"} == {
        "latent/4x4x4": (2, 4, 4, 4),
        "row/4x4x4": (2, 4),
        "latent/4x4x6": (1, 4, 4, 6),
        "row/4x4x6": (1, 4),
        "text": (2 * 9, 16),
        "caption": (3, 5),
        "content": (4, 2),
        "digests": (3,),
    }
    assert json.loads(bytes(part["captions"])) == {str(index): [[f"number {index % 2}", 1.0]] for index in (4, 6, 7)}
    (skipped,) = read_header(part_path(root, 4, 8)).skipped()
    assert (skipped.index, skipped.name, skipped.reason) == (5, "05.png", "caption 05.txt is missing")


def test_parts_are_as_readable_as_other_files(root):
    modes = {file.stat().st_mode for file in root.iterdir() if file.is_file()}
    assert len(modes) == 1


def test_opening_reads_headers_alone(root):
    for file in root.glob("part-*"):  # data that a check would refuse
        columns = read_header(file).columns.values()
        start, size = min(column.offset for column in columns), file.stat().st_size
        file.write_bytes(file.read_bytes()[:start] + b"\xff" * (size - start))
    store = FeatureStore.open(root)
    assert sum(store.buckets.values()) == len(CAPTIONED)
    with pytest.raises(UserError, match="is damaged in its header or tables"):
        read_rows(store, (4, 4, 4), [0])


@pytest.mark.parametrize("column", ["latent/4x4x4", "row/4x4x4", "text", "caption"])
def test_a_flipped_bit_is_found_when_its_row_is_read(root, column):
    file = part_path(root, 0, 4)
    found = read_header(file).columns[column]
    for byte in range(0, math.prod(found.shape) * found.dtype.itemsize, 3):
        flip_bit(file, found.offset + byte)
        store = FeatureStore.open(root)
        with pytest.raises(UserError, match=r"part-0+-0+4\.safetensors is damaged in .*: (its|the) digest differs"):
            [read_rows(store, bucket, range(store.buckets[bucket])) for bucket in store.buckets]
        flip_bit(file, found.offset + byte)
    read_rows(FeatureStore.open(root), (4, 4, 4), [0, 1])


def test_a_part_in_the_place_of_another_and_an_index_of_others_are_refused_by_name(root, schema):
    first, second = (part_path(root, start, end) for start, end in ((0, 4), (4, 8)))
    indexed = FeatureStore.open(root)  # writes the index, which has the parts' names and bytes
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    expected = rf"{first} is another part: it holds the images 4-8, not 0-4; delete it, then `bigdit extract"
    with pytest.raises(UserError, match=expected):
        Part.open(first)
    with pytest.raises(UserError, match=expected):
        read_rows(indexed, (4, 4, 4), [0])
    with pytest.raises(UserError, match=expected):
        read_rows(FeatureStore.open(root), (4, 4, 4), [0])
    with pytest.raises(UserError, match=expected):
        store_report(root, schema)
    (found,) = verify(root).damaged
    assert (found.file, found.start, found.end) == (first.name, 0, 4)
    assert "is another part" in found.problem
    first.write_bytes(whole)
    index = replace(indexed.index, counts=indexed.index.counts + np.eye(3, 2, dtype=np.int64) * [1, 0])
    write_index(root / "index.safetensors", index, store_identity(schema))
    (found,) = verify(root).damaged
    assert found.file == "index.safetensors"
    assert "has other rows than" in found.problem
    with pytest.raises(UserError, match=r"has other rows than .*index\.safetensors says; delete that index"):
        read_rows(FeatureStore.open(root), (4, 4, 4), [0])


def test_a_bit_flipped_anywhere_in_a_part_is_found_by_verifying(root):
    file = part_path(root, 0, 4)
    assert damages(file) == []
    for byte in range(0, file.stat().st_size, 11):
        flip_bit(file, byte)
        assert damages(file), byte
        flip_bit(file, byte)


def test_a_truncated_part_is_named_with_its_bytes(root):
    file = part_path(root, 8, 11)
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2):
        file.write_bytes(whole[:size])
        expected = rf"{file} is truncated: {len(whole)} bytes were expected, {size} were found; delete it, then `bigdit"
        with pytest.raises(UserError, match=expected):
            FeatureStore.open(root)
    for size in (0, 5, 100):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rf"is truncated: at least \d+ bytes were expected, {size} were found"):
            FeatureStore.open(root)
    file.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="is too long"):
        FeatureStore.open(root)
    file.write_bytes(whole.replace(b'"BF16"', b'"BF61"'))
    with pytest.raises(UserError, match=r"has a damaged header \(dtype 'BF61'\); delete it"):
        FeatureStore.open(root)


def test_a_part_truncated_after_opening_is_an_error_not_a_hang(root):
    store = FeatureStore.open(root)
    read_rows(store, (4, 4, 4), [0, 1])
    file = part_path(root, 0, 4)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"ends at byte \d+, before its data does"):
        read_rows(store, (4, 4, 4), [0, 1])


def test_missing_parts_are_counted_with_the_command_that_makes_them(root, tmp_path):
    part_path(root, 4, 8).unlink()
    with pytest.raises(UserError, match=r"lacks 1 of 4 files, the first part-0+4-0+8\.safetensors; `bigdit extract"):
        FeatureStore.open(root)
    with pytest.raises(UserError, match=r"nowhere holds no latents; `bigdit extract --config RUN\.yaml` makes them"):
        FeatureStore.open(tmp_path / "nowhere")
    (root / "schema.json").unlink()
    with pytest.raises(
        UserError, match=r"schema\.json is missing, and parts are there; `bigdit extract .* keeps them$"
    ):
        FeatureStore.open(root)


def with_metadata(file, **values):
    """Write a safetensors header again with other metadata."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= values
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "listed", ["[" * 100_000, '[[1e400, "a", "b"]]', "[3]", "\xff", "1" * 9999], ids=lambda text: text[:5]
)
def test_a_damaged_list_of_what_was_skipped_is_one_line(root, schema, listed):
    file = part_path(root, 4, 8)
    with_metadata(file, skipped=listed)
    with pytest.raises(UserError, match=rf"^data\.features: {file} has a damaged list of skipped images; delete it"):
        store_report(root, schema)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\0" * 64, b"[" * 100_000, b"{}", b""], ids=len)
def test_an_index_that_is_none_is_made_again(root, data):
    read_rows(FeatureStore.open(root), (4, 4, 4), [0])
    index = root / "index.safetensors"
    whole = index.read_bytes()
    for damaged in (data, len(data).to_bytes(8, "little") + data):
        index.write_bytes(damaged)
        read_rows(FeatureStore.open(root), (4, 4, 4), [0])
        assert index.read_bytes() == whole
    with_metadata(index, shapes="9" * 9999)
    read_rows(FeatureStore.open(root), (4, 4, 4), [0])
    assert index.read_bytes() == whole


def test_a_part_of_other_images_is_refused_by_name(root, schema, images, fill, tmp_path):
    """With the same encoders, buckets and range."""
    (images / "12.png").write_bytes((images / "00.png").read_bytes())
    (images / "12.txt").write_text("one more")
    sources = [ImageFolder(SourceConfig(path=images)).identity]
    fill(tmp_path / "other", schema.model_copy(update={"sources": sources}))
    file = part_path(root, 4, 8)
    indexed = FeatureStore.open(root)  # writes the index, which has the parts' names and bytes
    file.write_bytes(part_path(tmp_path / "other", 4, 8).read_bytes())
    expected = (
        f"data.features: {file} belongs to another store: its images, encoders or buckets differ; delete it, then "
        "`bigdit extract --config RUN.yaml` makes it again"
    )
    assert refusal(read_rows, indexed, (4, 4, 4), range(6)) == expected
    assert refusal(read_rows, FeatureStore.open(root), (4, 4, 4), range(6)) == expected
    assert refusal(store_report, root, schema) == expected
    assert [each.problem for each in verify(root).damaged] == [expected]
    (root / "index.safetensors").unlink()
    assert refusal(FeatureStore.open, root) == expected


def refusal(action, *arguments):
    with pytest.raises(UserError) as error:
        action(*arguments)
    (line,) = error.value.problems
    return line


def test_bytes_that_are_no_text_next_to_the_parts_are_passed_over(root, schema):
    (root / "speed").mkdir()
    (root / "report.json").write_bytes(b"\xff")
    for name in ("of nobody.jsonl", "h_b_s_1_2_t.jsonl"):
        (root / "speed" / name).write_bytes(b"\xff\xfe\n" + b"[" * 100_000)
    (root / "speed/h_b_s_3_4_t.jsonl").mkdir()
    assert store_report(root, schema).encoded == len(CAPTIONED)


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_in_the_place_of_a_part_is_one_line(root, kind):
    part = part_path(root, 0, 4)
    part.unlink()
    part.mkdir() if kind == "folder" else part.symlink_to(part)
    with pytest.raises(UserError, match=r"lacks 1 of 4 files, the first part-0+0-0+4\.safetensors; `bigdit extract"):
        FeatureStore.open(root)


def test_damage_to_the_null_text_is_found(root):
    file = root / "null_text.safetensors"
    flip_bit(file, read_header(file).columns["text"].offset)
    with pytest.raises(UserError, match=r"null_text\.safetensors is damaged: its digest differs"):
        FeatureStore.open(root).null_text  # noqa: B018
    flip_bit(file, read_header(file).columns["text"].offset)
    with_metadata(file, store="another")
    with pytest.raises(UserError, match=r"null_text\.safetensors belongs to another store: its encoders or"):
        FeatureStore.open(root).null_text  # noqa: B018
