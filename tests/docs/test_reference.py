"""The reference has every key and every option, each with a text."""

import re

import pytest
from commands import ROOT, in_process
from reference import commands, kind, pages, sections

from bigdit.catalog.gpus import gpus
from bigdit.catalog.models import models
from bigdit.config.run import RunConfig
from bigdit.config.wrong import meanings
from bigdit.encoders.recipes import RECIPES
from bigdit.strategy import Strategy

SECTIONS = {name: model for name, (_, model) in sections(RunConfig).items()} | {"Strategy": Strategy}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_says_what_it_means(name):
    assert [*meanings(SECTIONS[name])] == [*SECTIONS[name].model_fields]


def test_every_key_has_a_row():
    assert len(SECTIONS) > 12
    run, strategy = pages()["run.md"], pages()["strategy.md"]
    for name, model in SECTIONS.items():
        page = strategy if model is Strategy else run.split(f"{name} {{#{name.lower()}}}\n")[1].split("\n## ")[0]
        known = [*model.model_fields, *getattr(model, "also", ())]
        assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == known
    assert "\n## strategy.ema: EmaSpec {#emaspec}\n" in run
    assert "| `micro_batch_size` | Samples per process in one pass. | integer ≥ 1 | `1` |" in run
    assert "| `ema` | An EMA of the weights. | [EmaSpec](run.md#emaspec) or null | `null` |" in strategy
    assert "| `global_batch_size` | Samples of an optimizer step over all processes." in strategy


def test_every_command_and_option_is_there():
    page = pages()["commands.md"]
    found = re.findall(r"^## bigdit (.+)$", page, re.MULTILINE)
    assert found == [name for name, _ in commands()]
    shown = in_process("plan", "--help").stdout
    for option in re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE):
        assert f"| `{option}" in page


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "integer ≥ 0"),
        ({"type": "number", "ge": 0, "lt": 1}, "number ≥ 0, < 1"),
        ({"anyOf": [{"const": "all", "type": "string"}, {"type": "null"}]}, "`all` or null"),
        ({"type": "array", "items": {"type": "string", "format": "path"}}, "list of path"),
    ],
)
def test_types_are_words(part, words):
    assert kind(part) == words


def test_what_works_is_counted_as_it_is():
    first, table = (ROOT / "README.md").read_text(), (ROOT / "docs/works.md").read_text()
    classes = {model.spec.class_name for model in models()}
    assert f"/works.md): {len(models())} transformers, image and video, and {len(gpus())} GPUs" in first
    assert (
        f"| all {len(models())} of the catalogue, image and video, and any config of their {len(classes)} classes |"
        in table
    )
    assert f"the text encoders of {len(RECIPES)} diffusers pipelines |" in table
