"""Whatever a person writes is answered in time and without a traceback: a part of benchmarks/fuzz.py."""

import fuzz
import pytest
import yaml


def test_what_is_drawn_is_answered():
    found = fuzz.fuzz(200)
    assert sum(found.values()) >= 200
    assert found[0] > 0  # some of it is sound
    assert found[1] > 0


@pytest.mark.parametrize(
    ("written", "limit", "fault"),
    [
        (fuzz.Written(["gpus"]), 60, "Traceback"),
        (fuzz.Written(["models"]), 0.5, "no answer in 0.5 s"),
    ],
)
def test_what_is_no_answer_is_found(monkeypatch, written, limit, fault):
    def broken(*_):
        raise RuntimeError("unforeseen")

    def endless():
        while True:
            pass

    monkeypatch.setattr("bigdit.catalog.gpus.gpus", broken)
    monkeypatch.setattr("bigdit.catalog.models.models", endless)
    with pytest.raises(AssertionError, match=fault):
        fuzz.check(written, limit)


def test_what_is_drawn_reaches_the_keys_of_a_config():
    """There is a place for each value of a config, sections too."""
    keys = list(fuzz.places({"a": [1, {"b": 2}], "c": {}}))
    assert keys == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("c",)]
    assert ("train", "steps") in set(fuzz.places(yaml.safe_load(yaml.safe_dump(fuzz.RECIPE))))
