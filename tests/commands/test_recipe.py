"""`bigdit recipe`: what is listed, shown and copied is a run that its plan and `bigdit train` accept."""

import json

import pytest
import yaml
from commands import bigdit

from bigdit import catalog
from bigdit.config import load_run
from bigdit.recipes.recipe import names, recipe
from bigdit.train.prepare import prepare


def test_recipes_are_listed(tmp_path):
    found = json.loads(bigdit("recipe", "list", "--json").stdout)
    assert [each["name"] for each in found] == names()
    assert all(each["took"]["process_bytes"][1] < each["took"]["usable_bytes"] for each in found)
    shown = bigdit("recipe", "list", COLUMNS="80").stdout
    assert all(name in shown for name in names())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_a_run_of_the_catalogues_model_on_its_card(name, tmp_path):
    found = recipe(name)
    assert len(found.text.splitlines()) <= 40
    file = tmp_path / f"{name}.yaml"
    file.write_text(found.text)
    run = load_run(file, [])
    spec, _ = prepare(run, 1)
    assert spec == catalog.model(found.about.model).spec
    assert catalog.gpu(found.about.gpu)
    assert str(run.model.init_from).startswith(found.weights)
    assert str(run.encoders.text.pipeline) == found.weights


def test_one_is_shown_with_its_needs_and_all_commands_and_is_copied_as_it_stands(tmp_path):
    shown = bigdit("recipe", "show", "sana-1600m-a40").stdout
    found = recipe("sana-1600m-a40")
    for text in ("NVIDIA A40", "of RAM, while it saves", *found.commands, found.text):
        assert text in shown
    done = bigdit("recipe", "copy", "sana-1600m-a40", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    copied = tmp_path / "sana-1600m-a40.yaml"
    assert copied.read_text() == found.text
    copied.write_text("mine")
    again = bigdit("recipe", "copy", "sana-1600m-a40.yaml", "--out", tmp_path)
    assert again.returncode == 1
    assert again.stderr == f"error: {copied} is there already, and is left as it is; --out names another file\n"
    assert copied.read_text() == "mine"


def test_a_name_that_is_no_recipe_is_told_what_is_nearest():
    done = bigdit("recipe", "show", "sana-1600-a40")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no recipe 'sana-1600-a40'; did you mean sana-1600m-a40")


def test_commands_name_the_recipes_own_folders():
    for name in names():
        found = recipe(name)
        run = yaml.safe_load(found.text)
        assert any(run["output"] in command for command in found.commands)
        assert found.commands[0].endswith(found.weights)
