"""`bigdit recipe`: each run that it lists, shows and copies is accepted by its plan and by `bigdit train`."""

import json
from statistics import median

import pytest
from commands import ROOT, in_process

from bigdit import catalog
from bigdit.catalog.families import takes_classes
from bigdit.catalog.models import gates
from bigdit.config.stages import load_stages
from bigdit.recipes import MEASURED, names, recipe
from bigdit.train.prepare import prepare_stages
from bigdit.units import gib

RECIPES = MEASURED.parent


def test_recipes_are_listed(tmp_path):
    found = json.loads(in_process("recipe", "list", "--json").stdout)
    assert [each["name"] for each in found] == names()
    assert all(each["took"]["process_bytes"][1] < each["took"]["usable_bytes"] for each in found)
    shown = in_process("recipe", "list", COLUMNS="80").stdout
    assert all(name in shown for name in names())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_a_run_of_the_catalogues_model_on_its_gpu(name):
    found = recipe(name)
    assert len(found.text.splitlines()) <= 40
    stages = prepare_stages(load_stages(RECIPES / f"{name}.yaml"))
    assert len(stages) == found.stages
    assert catalog.gpu(found.about.gpu)
    for each in stages:
        assert each.strategy.world_size == found.processes
        assert each.spec == catalog.model(found.about.model).spec
        assert str(each.run.model.init_from).startswith(found.weights)
        encoders = each.run.encoders
        text = [] if encoders.text is None else [encoders.text.pipeline]
        assert len(text) != takes_classes(each.spec)
        assert {str(folder) for folder in (encoders.image.path.parent, *text)} == {found.weights}


def test_one_is_shown_with_its_needs_and_all_commands_and_is_copied_as_it_stands(tmp_path):
    shown = in_process("recipe", "show", "sana-1600m-a40").stdout
    found = recipe("sana-1600m-a40")
    for text in ("NVIDIA A40", "of memory while it saves", *found.commands, found.text):
        assert text in shown
    done = in_process("recipe", "copy", "sana-1600m-a40", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    copied = tmp_path / "sana-1600m-a40.yaml"
    assert copied.read_text() == found.text
    copied.write_text("mine")
    again = in_process("recipe", "copy", "sana-1600m-a40.yaml", "--out", tmp_path)
    assert again.returncode == 1
    assert again.stderr == f"error: {copied} exists already, and was not changed; name another file with --out\n"
    assert copied.read_text() == "mine"


@pytest.mark.parametrize("name", ["flux.1-dev-rtx-4090", "sd3.5-medium-lora-rtx-3060", "sana-1600m-a40"])
def test_a_licence_and_a_login_are_named_before_the_download_that_needs_them(name):
    found = recipe(name)
    lines = in_process("recipe", "show", name).stdout.splitlines()
    before = lines[lines.index(found.commands[0]) - 1]
    repository = found.about.repository
    if repository in gates():
        comment = [line.removeprefix("# ") for line in lines[: lines.index(found.commands[0])] if line.startswith("# ")]
        printed = f"gated: accept the licence at https://huggingface.co/{repository}, and log in by `hf auth login`"
        assert " ".join(comment) == printed
    else:
        assert (before, name) == ("", "sana-1600m-a40")


@pytest.mark.parametrize("name", names())
def test_what_is_read_fits_a_terminal_and_what_is_pasted_is_one_line(name):
    found = recipe(name)
    read, pasted = in_process("recipe", "show", name).stdout.split(f"\n{found.commands[0]}\n")
    assert max(map(len, read.splitlines())) <= 80
    assert pasted.startswith("\n".join(found.commands[1:]))


def test_gated_repositories_are_those_of_models():
    assert gates()
    assert all(catalog.model(repository).name for repository in gates())


def test_what_has_no_ending_is_a_folder(tmp_path):
    done = in_process("recipe", "copy", "sana-1600m-a40", "--out", tmp_path / "my/runs")
    assert done.stderr == f"wrote {tmp_path}/my/runs/sana-1600m-a40.yaml\n"
    (tmp_path / "file").write_text("mine")
    done = in_process("recipe", "copy", "sana-1600m-a40", "--out", tmp_path / "file")
    assert done.stderr == f"error: {tmp_path}/file exists already, and was not changed; name another file with --out\n"


def test_what_it_saves_is_shown_and_in_the_json():
    name = "sana-1600m-a40"
    saved, extraction = recipe(name).took.saved, recipe(name).took.extraction
    parts = saved.weights_bytes + saved.optimizer_bytes + saved.ema_bytes
    assert 0 < saved.checkpoint_bytes - parts < 2**20  # headers
    assert saved.most_bytes == 3 * saved.checkpoint_bytes + 2 * saved.export_bytes
    shown = " ".join(in_process("recipe", "show", name).stdout.split())
    for text in (
        "19.3 GB for each checkpoint (6.42 GB of weights, 12.8 GB of the optimizer's state), of which 2 stay",
        "at most 70.6 GB: 3 of them while one is written, and 2 exports of 6.42 GB",
        f"`bigdit extract` allocates {gib(extraction.peak_allocated_bytes)} and reserves "
        f"{gib(extraction.peak_reserved_bytes)}: 8 images of each size",
    ):
        assert text in shown
    printed = json.loads(in_process("recipe", "show", name, "--json").stdout)
    assert printed["took"]["saved"] == saved.model_dump()
    assert printed["took"]["extraction"] == extraction.model_dump()
    assert (printed["commands"], printed["yaml"]) == (recipe(name).commands, recipe(name).text)
    (listed,) = [each for each in json.loads(in_process("recipe", "list", "--json").stdout) if each["name"] == name]
    assert listed == {key: value for key, value in printed.items() if key not in ("commands", "yaml")}


@pytest.mark.parametrize("name", names())
def test_as_many_checkpoints_are_counted_as_its_yaml_keeps(name):
    stages, saved = load_stages(RECIPES / f"{name}.yaml"), recipe(name).took.saved
    steps, train = stages[-1].end, stages[-1].run.train
    assert steps > train.keep_checkpoints * train.checkpoint_every
    assert (saved.checkpoints, saved.checkpoints_at_once) == (train.keep_checkpoints, train.keep_checkpoints + 1)
    assert saved.exports == (steps // train.export_every if train.export_every else len(stages))


def test_deepspeeds_document_is_within_the_yaml():
    found = recipe("pixart-sigma-8x-v100")
    shown = in_process("recipe", "show", found.name).stdout
    assert all(text in shown for text in ("8 × Tesla V100-SXM2-16GB, each", found.text.rstrip()))
    assert load_stages(RECIPES / f"{found.name}.yaml")[0].run.strategy.zero_stage == 2


def test_how_wide_hours_are_is_what_the_faq_says():
    ratios = [took.hours[1] / took.hours[0] for took in (recipe(name).took for name in names())]
    printed = f"{min(ratios):.1f} to {max(ratios):.1f} times the low (median {median(ratios):.1f})"
    assert printed in " ".join((ROOT / "docs/errors.md").read_text().split())


def test_videos_and_classes_are_asked_for_as_such():
    shown = " ".join(in_process("recipe", "show", "wan2.1-1.3b-lora-rtx-4090").stdout.split())
    assert "of latents and embeddings for 100,000 videos " in shown
    assert "GiB: one video of each size " in shown
    low, high = recipe("wan2.1-1.3b-lora-rtx-4090").took.encoding_hours
    assert f"{low:.1f} to {high:.1f} h before it, to encode 100,000 videos on the GPU" in shown
    assert "not counted: download, reading and decoding, samples and saving" in shown
    assert '--caption "a fox in the snow"' in recipe("wan2.1-1.3b-lora-rtx-4090").commands[-1]
    assert recipe("dit-xl-2-rtx-4090").commands[-1].endswith("--label 0")


def test_a_name_that_is_no_recipe_is_an_error_with_the_nearest():
    done = in_process("recipe", "show", "sana-1600-a40")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no recipe 'sana-1600-a40'; did you mean sana-1600m-a40")
    done = in_process("recipe", "show", "A40")
    known = "cogvideox-2b-a40, sana-1600m-a40, wan2.2-a14b-high-lora-a40"
    assert done.stderr == f"error: there is no recipe 'A40'; did you mean {known}?\n"


def test_commands_name_the_recipes_own_folders():
    for name in names():
        found = recipe(name)
        assert any(found.run["output"] in command for command in found.commands)
        assert found.commands[0].endswith(found.weights)
