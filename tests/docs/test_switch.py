"""docs/switch.md names keys of a run, and gives other trainers' names the meaning that error messages give."""

import re

import pytest
from commands import ROOT
from reference import sections

from bigdit.config.run import RunConfig
from bigdit.config.wrong import KEYS

ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line[1:-1].split("|")]
    for line in (ROOT / "docs/switch.md").read_text().splitlines()
    if line.startswith("| ") and not re.match(r"\| (diffusers|---)", line)
]


def known():
    """All keys of a run by their full names."""
    for path, model in sections(RunConfig).values():
        yield path
        yield from (f"{path}.{key}".lstrip(".") for key in [*model.model_fields, *getattr(model, "also", ())])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_has_keys_of_a_run_and_means_what_errors_say(row):
    *theirs, ours, differs = row
    assert set(ours) <= {*known()}
    meant = {name: KEYS[name].key for names in theirs for name in names if name in KEYS}
    named = {*ours, *(text.split(":")[0] for text in differs)}
    named |= {key.rpartition(".")[0] for key in ours}  # a name that stands for several keys of a section
    assert {name: key for name, key in meant.items() if key not in named} == {}


def test_there_are_rows():
    assert len(ROWS) > 50
