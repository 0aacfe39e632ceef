"""A matrix of training steps, predicted before and then run on a real GPU: memory block by block, and seconds.

python benchmarks/gpu_matrix.py predict
python benchmarks/gpu_matrix.py measure OUT [--held-out] [--seconds 540]
python benchmarks/gpu_matrix.py report [OUT ...]
python benchmarks/gpu_matrix.py replay

`predict` runs the points that have no prediction yet on the emulated GPU, and adds them to on_gpu/predicted.json. That
comes first, is committed before they are measured, and is refused after that. BIGDIT_CUDA_PYTHON names the torch of
the measurements here too. `measure` runs on a machine with the GPU, most important points first,
each in a fresh process. It continues where it was, needs no network, and ends within its seconds.
Beside numpy, Pillow and what torch itself wants it needs 64 MB of wheels: bitsandbytes (43 MB; 4 MB with the library of
one CUDA), diffusers (6 MB), torchao (3 MB), pydantic with pydantic-core (3 MB), DeepSpeed (2 MB), rich with Pygments
and markdown-it-py (2 MB), below 1 MB each huggingface_hub, PyYAML, regex, safetensors, msgpack, accelerate,
charset-normalizer, psutil, urllib3, anyio, certifi, packaging, httpx2, httpcore2, tqdm, requests, idna, einops, hjson,
h11, py-cpuinfo, truststore, typing-inspection, annotated-types. Points of LoRA and those with features online need
transformers with tokenizers, peft and xxhash too (18 MB): with bitsandbytes' one library 25 and 43 MB. `report`
writes both side by side into gpu_matrix.md, and what was measured into on_gpu/measured.json. `replay` runs the measured
points on the emulated GPU of today (BIGDIT_CUDA_PYTHON=.venv-oldest/bin/python has the torch of the measurements), and
writes on_gpu/replayed.json and the page.

Points marked as held out are measured last, and no rule and no constant is ever made from them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from on_gpu.page import MEASURED, measured, report
from on_gpu.points import POINTS, Point
from on_gpu.predicted import PREDICTED, REPLAYED, Predictions, predict
from on_gpu.processes import Ahead

from bigdit.errors import UserError, guard
from bigdit.files import write_text

STEPS = 5
"""Timed steps, beside two that are traced and one that is profiled."""

MOST_SECONDS = 150.0
"""For one point. DeepSpeed compiles an operator in its first one."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("predict")
    measuring = what.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--held-out", action="store_true")
    measuring.add_argument("--seconds", type=float, default=540.0)
    reporting = what.add_parser("report")
    reporting.add_argument("outs", type=Path, nargs="*")
    what.add_parser("replay")
    options = parser.parse_args(arguments)
    match options.what:
        case "predict":
            known = Predictions.model_validate_json(PREDICTED.read_bytes()).points if PREDICTED.exists() else ()
            _check_first({point.name for point in POINTS} - {each.name for each in known})
            predict(POINTS, PREDICTED, known)
        case "measure":
            measure(options.out, [each for each in POINTS if each.held_out == options.held_out], options.seconds)
        case "report":
            report(options.outs)
        case "replay":
            taken = {each.name for each in measured()}
            predict([point for point in POINTS if point.name in taken], REPLAYED)
            report([])
    return 0


def _check_first(unpredicted: set[str]) -> None:
    """Raise UserError if these points are measured already: a prediction would come too late."""
    if late := unpredicted & {each.name for each in measured()}:
        raise UserError(
            f"{len(late)} of {len(unpredicted)} points without a prediction are measured, and predictions come before "
            f"that; for another GPU, move {PREDICTED.name} and {MEASURED.name} away from {MEASURED.parent}"
        )


def _check_card() -> None:
    """Raise UserError if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"measure takes steps on this machine's GPU, and torch {torch.__version__} of {sys.executable} sees none; "
            "start it by a python whose torch does"
        )


def measure(out: Path, points: list[Point], seconds: float) -> None:
    """Measure those of `points` that OUT lacks, one after another. While one runs, the next ones import torch."""
    began = time.perf_counter()
    _check_card()
    out.mkdir(parents=True, exist_ok=True)
    missing = [point for point in points if not (out / f"{point.key}.json").exists()]
    with Ahead(missing, out, STEPS) as processes:
        for point in missing:
            left = seconds - (time.perf_counter() - began)
            if left < 20:
                raise UserError(f"{seconds:g} s are over, and {point.name} is not measured; the same command goes on")
            said = processes.run(point, min(left, MOST_SECONDS))
            if said is not None:
                write_text(out / f"{point.key}.failed", said)
            print(f"{time.perf_counter() - began:5.0f} s  {point.name}: {said or 'measured'}", flush=True)


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
