"""Documents that bigdit reads back, with a value of another type anywhere in them: each is answered in lines."""

import copy
import itertools
import json
import os
import shutil
import signal
from contextlib import suppress

import pytest
import torch
from commands import DIGITS, SINGLE, TINY

from bigdit import models
from bigdit.catalog.resolve import read_model_config
from bigdit.checkpoint import find_checkpoint, pipeline_of, verify
from bigdit.checkpoint.folder import LATEST, STATE, check_exported, write_state
from bigdit.config.stages import load_run, load_stages
from bigdit.errors import UserError
from bigdit.report.run import read_run
from bigdit.sampling.sampler import Sampler
from bigdit.sources.open import open_source
from bigdit.train.prepare import prepare_stages
from bigdit.train.resume import start_notices

VALUES = (None, True, -1, 0.5, "x", [], {}, [[1]], {"x": 1}, 2**63, "", ["../x"], {"../x": "y"})
STEP = "step-00000008"
LIMIT_S = 120


@pytest.fixture(autouse=True)
def limited():
    """A wait without end fails."""
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


@pytest.fixture
def output(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def resumed(output, features):
    """The stages of a run that resumes from the output."""
    overrides = [*TINY, *SINGLE, f"data.features={features}", f"output={output}", "train.steps=9"]
    return prepare_stages(load_stages(DIGITS, overrides))


def damaged(document, values):
    """The document with one value of another type, at each place in turn. Of parameters' shapes, only the first
    three."""
    for key in places(document):
        *parents, last = key
        changed = copy.deepcopy(document)
        node = changed
        for parent in parents:
            node = node[parent]
        node[last] = next(value for value in values if type(value) is not type(node[last]))
        yield changed


def places(document, key=()):
    if key:
        yield key
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in itertools.islice(inner, 3 if key == ("parameters",) else None):
        yield from places(value, (*key, name))


def answered(*doors):
    """Any exception but UserError fails the test."""
    for door in doors:
        with suppress(UserError):
            door()


def test_a_state_of_wrong_types_under_its_right_checksum(output, resumed):
    folder = output / f"checkpoints/{STEP}"
    state = json.loads((folder / STATE).read_text())
    del state["checksum"]

    def loaded():
        found, _ = find_checkpoint(output)
        verify(found)
        pipeline_of(found)
        Sampler(found, torch.device("cpu"))

    assert len(list(places(state))) > 150
    for changed in damaged(state, itertools.cycle(VALUES)):
        write_state(folder, changed)
        answered(lambda: start_notices(resumed), loaded)

    for key, value in {"strategy": 7, "lineage": ["8"], "checksums": {"../latest": "0"}, "run": [], "saved": 1}.items():
        write_state(folder, state | {key: value})
        with pytest.raises(UserError, match=rf"{STATE} is damaged: {key}[.:]"):
            find_checkpoint(folder)
    write_state(folder, state)
    loaded()


def test_what_a_run_and_its_export_say_of_themselves(output):
    export = output / f"exports/{STEP}/transformer"
    (output / "metrics.jsonl").write_text('{"step": 8, "loss": 1.0}\n')

    def loaded():
        check_exported(export)
        models.load(read_model_config(export), export, dtype=torch.float32)

    doors = {
        output / "run.json": lambda: read_run(output).document(),
        output / "receipt.json": lambda: read_run(output).document(),
        export / "checksums.json": loaded,
        export / "config.json": lambda: models.load(read_model_config(export), export, dtype=torch.float32),
    }
    for file, door in doors.items():
        printed = json.loads(file.read_text())
        for changed in itertools.islice(damaged(printed, itertools.cycle(VALUES)), 0, None, 3):
            file.write_text(json.dumps(changed))
            answered(door)
        file.write_text(json.dumps(printed))
        door()


@pytest.mark.parametrize(
    ("name", "printed"),
    [("state.json", {"_data_files": [{"filename": "a"}]}), ("dataset_dict.json", {"splits": ["a"]})],
)
def test_what_a_saved_data_set_says_of_itself(name, printed, tmp_path):
    data = load_run(DIGITS, [f"data.images={tmp_path}"]).data
    for value in VALUES:
        for changed in damaged(printed, itertools.cycle([value, *VALUES])):
            (tmp_path / name).write_text(json.dumps(changed))
            with pytest.raises(UserError):
                open_source(data)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large"])
def test_what_is_no_file_is_neither_waited_for_nor_read_whole(kind, output, resumed):
    folder = output / f"checkpoints/{STEP}"
    shards = sorted((folder / "engine").iterdir())
    for file in (output / "checkpoints" / LATEST, folder / STATE, *shards):
        before = file.read_bytes()
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        elif kind == "device":
            file.symlink_to("/dev/zero")
        else:
            file.touch()
            os.truncate(file, 2**40)
            if file in shards:
                file.unlink()  # all bytes of weights are read, whatever their number
        answered(lambda: start_notices(resumed), lambda: verify(find_checkpoint(output)[0]))
        if kind == "pipe" and file.name == STATE:
            with pytest.raises(UserError, match=r"it is a named pipe, and a regular file was expected"):
                start_notices(resumed)
        file.rmdir() if kind == "folder" else file.unlink(missing_ok=True)
        file.write_bytes(before)
    verify(find_checkpoint(output)[0])
