"""A store's schema: what it records, which stores it refuses, and how damage to it is found."""

import json

import pytest

from bigdit.errors import UserError
from bigdit.extract.verify import verify
from bigdit.store import FeatureStore
from bigdit.store.schema import claim, part_identity, schema_text
from bigdit.store.tensors import lines_digest


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sources": [{"count": 10**15}]}, "has 1000000000000000 images in parts of 4: more than 10000000 files"),
        ({"sources": [{"count": 5}]}, "lacks 1 of 3 files, the first part-000000000004-000000000005.safetensors"),
        (
            {"sources": [{"count": 4}]},
            "has 2 parts that are not among the 1 of its schema.json, which is dam",
        ),
        ({"sources": [{}]}, "schema.json is damaged: its checksum is wrong; delete it, then `bigdit extract"),
        ({"sources": [{"count": "x"}]}, "schema.json is damaged: its checksum is wrong; delete it, then"),
    ],
)
def test_a_schema_of_other_sources_is_one_line(root, schema, change, problem):
    (root / "schema.json").write_text(schema_text(schema.model_copy(update=change)))
    with pytest.raises(UserError) as error:
        FeatureStore.open(root)
    (line,) = error.value.problems
    assert problem in line


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"part_size": 5}, "is damaged: its checksum is wrong; delete it, then `bigdit extract"),
        ({"checksum": "0"}, "is damaged: its checksum is wrong; delete it, then `bigdit extract"),
        ({"part_size": 0}, "is damaged: its keys are wrong; delete it, then"),
        ({"version": 2}, "is damaged: its keys are wrong; delete it, then"),
        ({"more": 1}, "is damaged: its keys are wrong; delete it, then"),
    ],
)
def test_a_schema_that_was_changed_is_one_line(root, change, problem):
    file = root / "schema.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    for look in (FeatureStore.open, verify):
        with pytest.raises(UserError) as error:
            look(root)
        (line,) = error.value.problems
        assert problem in line


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "{}", "\0", '{"version": "x"}'])
def test_a_schema_that_is_none_is_one_line(root, text):
    (root / "schema.json").write_text(text)
    with pytest.raises(UserError) as error:
        FeatureStore.open(root)
    (line,) = error.value.problems
    assert line.startswith(f"data.features: {root}/schema.json is damaged: ")
    assert line.endswith("; delete it, then `bigdit extract --config RUN.yaml` makes it again")


def test_a_flipped_bit_of_a_schema_is_found_and_it_is_made_again(root, schema):
    file = root / "schema.json"
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 37):  # each byte in turn
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"schema\.json is damaged: .*; delete it, then `bigdit extract"):
            FeatureStore.open(root)
    file.unlink()
    claim(root, schema)
    assert file.read_bytes() == whole
    assert len(FeatureStore.open(root).buckets) == 2


def with_checksum(plain):
    """A schema's text with its correct checksum."""
    return json.dumps(plain | {"checksum": lines_digest([json.dumps(plain, sort_keys=True).encode()])})


def test_values_of_wrong_types_under_a_right_checksum_are_one_line_or_read(root, schema):
    file = root / "schema.json"
    plain = {name: each for name, each in json.loads(file.read_text()).items() if name != "checksum"}
    plain["text_encoder"] |= {"streams": {"more": {"max_tokens": 2, "dim": 3}}, "components": {"part": {}}}
    plain["first_frame"] = {"tokens": 2, "dim": 3}
    plain["sources"].append({"kind": "added", "count": 2, "of": 0})
    plain["changes"] = [{"sources": [{"count": 8}], "gone": [[0, 1, -1], [2, 3, 4]]}]
    refused = 0
    for place in places_of(plain):
        for value in (None, True, -1, 1.5, float("inf"), "x", [], [[]], {}, {"a": 1}):
            file.write_text(with_checksum(changed(plain, place, value)))
            for look in (FeatureStore.open, lambda each: claim(each, schema)):
                try:
                    look(root)
                except UserError as error:
                    refused += 1
                    assert all(line.startswith("data.features: ") for line in error.problems)  # noqa: PT017
    assert refused > 500


def places_of(value, before=()):
    """The keys that lead to each value of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*before, key)
        yield from places_of(inner, (*before, key))


def changed(document, place, value):
    copy = json.loads(json.dumps(document))
    within = copy
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    return copy


def test_a_store_of_another_version_is_rejected(root):
    file = root / "schema.json"
    plain = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"}
    plain["version"] = 3
    for text in (with_checksum(plain),):
        file.write_text(text)
        with pytest.raises(UserError, match=r"schema\.json has version 3, expected 5"):
            FeatureStore.open(root)


def test_what_a_part_is_of_follows_from_its_own_source_alone(schema):
    own = part_identity(schema, 4)
    grown = schema.model_copy(update={"sources": [*schema.sources, {"count": 3}]})
    assert part_identity(grown, 4) == own == part_identity(schema, 8)
    later = schema.model_copy(update={"sources": [{"count": 4}, *schema.sources]})
    end = schema.sources[0]["count"]
    others = [part_identity(grown, end), part_identity(later, 4)]  # the same images, from another place on
    for key, value in {"buckets": [(8, 8), (12, 8)], "codec": {"name": "other"}, "text_encoder": {}}.items():
        others.append(part_identity(schema.model_copy(update={key: value}), 4))
    assert len({own, *others}) == 6


def test_another_schema_is_refused_by_the_keys_that_differ(root, schema):
    claim(root, schema)
    other = schema.model_copy(update={"part_size": 5, "codec": schema.codec | {"factor": 1}})
    with pytest.raises(UserError) as error:
        claim(root, other)
    assert len(error.value.problems) == 1
    assert "codec.factor is 2 there and 1 in this run; part_size is 4 there and 5 in this run" in str(error.value)
    (root / "schema.json").write_text("{")
    with pytest.raises(UserError, match=r"schema\.json is damaged: not JSON: .*; delete it, then"):
        claim(root, schema)
