"""Tiny runs of the digits in this process."""

import contextlib
import io

import yaml
from commands import DIGITS, SINGLE, TINY, in_process, reading, with_set
from safetensors.torch import load_file

from bigdit import checkpoint
from bigdit.config.stages import load_stages
from bigdit.dist import World
from bigdit.errors import guard
from bigdit.train.__main__ import main
from bigdit.train.loop import train
from bigdit.train.prepare import prepare_stages
from bigdit.train.processes.stop import Stop


def launched(config, overrides):
    """Train in this process as a launched one does. Returns the exit status."""
    return guard(lambda: main(["--config", str(config), *with_set(overrides)]))


def run(features, output, *more):
    """Train a tiny run of the digits. Returns the exit status."""
    return launched(DIGITS, [*TINY, *SINGLE, *reading(features), f"output={output}", *more])


def encoded_for(folder, model, vae, data, text=(), strategy=(), **encoders):
    """A run.yaml of two steps in the folder, whose images are encoded with the pipeline there and this VAE. Returns
    it and the output."""
    pipeline = folder / "pipeline"
    vae.save_pretrained(pipeline / "vae")
    config = {
        "model": model,
        "data": {"images": str(folder / "images"), "features": str(folder / "features"), **data},
        "encoders": {
            "image": {"name": "vae", "class_name": type(vae).__name__, "path": str(pipeline / "vae")},
            "text": {"pipeline": str(pipeline), **dict(text)},
            **encoders,
        },
        "strategy": {"micro_batch_size": 2, "precision": "fp32", **dict(strategy)},
        "train": {"steps": 2},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = in_process("extract", "--config", folder / "run.yaml", "--workers", "1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_here(config, *overrides):
    """Train the run of a YAML in this process, by the command's own function."""
    assert launched(config, overrides) == 0


def refusal(config, *overrides):
    """What training says of the run of a YAML that it refuses."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert launched(config, overrides) == 1
    return " ".join(printed.getvalue().split())


def run_to(steps, output, features, *overrides):
    """Train in this process up to `steps`, resuming from `output`. Returns the last checkpoint."""
    settings = [*TINY, *SINGLE, f"data.features={features}", f"output={output}", f"train.steps={steps}", *overrides]
    prepared = prepare_stages(load_stages(DIGITS, settings))
    train(prepared, World(), Stop(prepared[0].run.train.grace, World()))
    found, _ = checkpoint.latest(output)
    return found


def exported(found, name):
    """The tensors of the checkpoint that the run exported when it ended."""
    return load_file(next((found.folder.parents[1] / "exports" / found.folder.name / name).glob("*.safetensors")))
