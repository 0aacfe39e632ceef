"""A sweep that SimpleTuner's author measured on an H100 and an L40S, run again on emulated GPUs: writes sweep.md.

    python benchmarks/sweep.py --simpletuner FOLDER --work FOLDER --python PATH [--show] [ID ...]

sweep.json names the source, its commit, the cells, and what turns an example of SimpleTuner into a cell. FOLDER is a
checkout at that commit, which stays as it is. PATH is a Python 3.12 with what its setup.py asks for and a CUDA build of
torch. --work keeps generated data and SimpleTuner's caches, which the author filled before measuring as well. --show
prints the command of each cell and runs nothing. Found figures are kept in sweep_found.json, cell by cell.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages import kept

from bigdit.emulator.fake_tokenizers import write_tokenizer
from bigdit.emulator.fake_weights import lay_out
from bigdit.files import write_json, write_text
from bigdit.units import GIB

HERE = Path(__file__).parent
PAGE, CELLS, FOUND = HERE / "sweep.md", HERE / "sweep.json", HERE / "sweep_found.json"
GPUS = {"H100": "h100-sxm", "L40S": "l40s"}
STEPS = 2
WITH_SCHEDULER = """import runpy
from diffusers import FlowMatchEulerDiscreteScheduler
from simpletuner.helpers.models.common import ModelFoundation
ModelFoundation._load_scheduler_for_pipeline = lambda model, kind: FlowMatchEulerDiscreteScheduler()
runpy.run_path("simpletuner/train.py", run_name="__main__")
"""
"""SimpleTuner, for families whose pipeline of captions it makes without a scheduler, which ends with a TypeError."""
NOTES = "## What differs, and why"
HEAD = """# SimpleTuner's sweep on emulated GPUs

Made by `python benchmarks/sweep.py`. SimpleTuner runs unmodified but for one function of two families, with empty
weights and generated data. *Measured* is the peak that its author published; *emulated* is the most that torch
allocated in {steps} steps, from the first forward pass on. Both in GiB. Kernels are not run.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simpletuner", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("ids", nargs="*", help="an id, or the start of several")
    asked = parser.parse_args()
    document = json.loads(CELLS.read_text())
    for cell in document["cells"]:
        name = identity(cell)
        if asked.ids and not name.startswith(tuple(asked.ids)):
            continue
        command, variables = prepare(document, cell, asked.simpletuner.resolve(), asked.work.resolve(), asked.python)
        if asked.show:
            print(name, *(f"{key}={value}" for key, value in variables.items()), shlex.join(command))
            continue
        figures = run(command, variables, asked.simpletuner, asked.work / f"{name}.log")
        found = {**(json.loads(FOUND.read_text()) if FOUND.exists() else {}), name: figures}
        print(name, cell["measured"], json.dumps(found[name]), flush=True)
        write_json(FOUND, found)
        write_text(PAGE, page(document, found))


def identity(cell: dict[str, Any]) -> str:
    return "/".join(cell[key] for key in ("family", "precision", "mode", "gpu")).lower()


def prepare(
    document: dict[str, Any], cell: dict[str, Any], simpletuner: Path, work: Path, python: str
) -> tuple[list[str], dict[str, str]]:
    """Write a cell's config: the example's with the cell's changes. Returns its command and variables."""
    family = document["families"][cell["family"]]
    folder = work / identity(cell)
    folder.mkdir(parents=True, exist_ok=True)
    example = simpletuner / "simpletuner" / "examples" / family["example"]
    config = json.loads((example / "config.json").read_text())
    config |= document["options"] | document["precisions"][cell["precision"]] | document["modes"][cell["mode"]]
    config |= family.get("options", {}) | family.get("modes", {}).get(cell["mode"], {})
    config |= {"output_dir": str(folder / "output"), "cache_dir": str(work / "cache" / cell["family"])}
    config["data_backend_config"] = str(write_data(family, work, simpletuner, config))
    if "lycoris_config" in config:
        config["lycoris_config"] = str(example / "lycoris_config.json")
    write_json(folder / "config.json", config)
    command = [str(Path(sys.executable).with_name("bigdit")), "emulate", "--gpu", GPUS[cell["gpu"]], "--json"]
    command += ["--steps", str(STEPS)]
    script = ["-c", WITH_SCHEDULER] if family.get("lacks_scheduler") else ["simpletuner/train.py"]
    return [*command, "--", python, *script], {
        "CONFIG_BACKEND": "json",
        "CONFIG_PATH": str(folder),
        "PYTHONPATH": str(simpletuner),
        "HF_HUB_CACHE": str(write_hub(document, work)),
        "HF_HUB_OFFLINE": "1",
    }


def write_hub(document: dict[str, Any], work: Path) -> Path:
    """Write a hub cache of all families with empty weights, as --fake-weights makes one, but for what is there."""
    hub = work / "hub"
    asked = [name for family in document["families"].values() for name in family["fake"]]
    names = [name for name in asked if not (hub / f"models--{name.partition('=')[0].replace('/', '--')}").is_dir()]
    if not names:
        return hub
    for name, configs in document["repositories"].items():
        for path, content in configs.items():
            (work / name / path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith("/"):
                write_tokenizer(content, work / name / path)
            else:
                write_json(work / name / path, content)
    lay_out([f"{name}={work / name}" if name in document["repositories"] else name for name in names], work)
    return hub


def write_data(family: dict[str, Any], work: Path, simpletuner: Path, config: dict[str, Any]) -> Path:
    """Write the example's own data backend, with noise in place of the hub's data set. Returns its path."""
    backends = json.loads((simpletuner / "simpletuner/examples" / Path(config["data_backend_config"]).name).read_text())
    data = backends[0]
    for key in ("dataset_name", "huggingface"):
        data.pop(key, None)
    caption = "instanceprompt" if data["caption_strategy"] == "instanceprompt" else "textfile"
    data |= {"type": "local", "metadata_backend": "discovery", "caption_strategy": caption}
    data |= {"instance_data_dir": str(write_files(work, family["data"])), "cache_dir_vae": f"{config['cache_dir']}/vae"}
    backends[-1]["cache_dir"] = f"{config['cache_dir']}/text"
    path = work / f"{family['example']}.data.json"
    write_json(path, backends)
    return path


def write_files(work: Path, shape: list[int]) -> Path:
    """Write noise as images of [width, height], or as videos of [width, height, frames] with captions, unless they
    are there."""
    import imageio.v3 as imageio
    import numpy

    folder = work / "x".join(map(str, shape))
    if folder.is_dir():
        return folder
    folder.mkdir(parents=True)
    width, height, *frames = shape
    random = numpy.random.default_rng(0)
    for number in range(8 if frames else 24):
        noise = random.integers(0, 256, (*frames, height // 16, width // 16, 3), dtype=numpy.uint8)
        pixels = noise.repeat(16, axis=-3).repeat(16, axis=-2)
        if frames:
            imageio.imwrite(folder / f"{number:02}.mp4", pixels, plugin="pyav", codec="libx264", fps=24)
            (folder / f"{number:02}.txt").write_text(f"a small figure walks through a bright town, take {number}\n")
        else:
            imageio.imwrite(folder / f"{number:02}.png", pixels)
    return folder


def run(command: list[str], variables: dict[str, str], simpletuner: Path, log: Path) -> dict[str, Any]:
    """The figures of one cell. Its output is kept in `log`."""
    done = subprocess.run(
        command, cwd=simpletuner, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    write_text(log, done.stderr + done.stdout)
    report = json.loads(done.stdout) if done.stdout.strip() else {}
    account: dict[str, Any] = next((account for each in report.get("runs", []) for account in each["accounts"]), {})
    versions = {"torch": account["versions"]["torch"].split("+")[0]} if account else {}
    if done.returncode == 2 and report.get("fits") is False:
        return {"out_of_memory": True, **versions}
    if done.returncode or not account.get("steps"):
        return {"failed": report.get("reason") or f"exit status {done.returncode}", **versions}
    phases = {phase["phase"]: phase["peak_allocated_bytes"] / GIB for phase in account["gpus"][0]["phases"]}
    peak = max(value for phase, value in phases.items() if phase != "start")
    figures = {"steps": account["steps"], "peak_gib": round(peak, 4), "start_gib": round(phases["start"], 4)}
    return {**figures, "seconds": round(report["runs"][0]["seconds"]), **versions}


def page(document: dict[str, Any], found: dict[str, Any]) -> str:
    """sweep.md: the figures over all cells, the table, and what is known of the differences."""
    rows, errors, verdicts = [], [], []
    for cell in document["cells"]:
        got, measured = found.get(identity(cell)), cell["measured"]
        if got is None:
            continue
        said = "OOM" if got.get("out_of_memory") else f"{got['peak_gib']:.2f}" if "peak_gib" in got else "did not run"
        off = ""
        if "OOM" in (measured, said):
            verdicts.append(measured == said)
            off = "agrees" if measured == said else "**contradicts**"
        elif "peak_gib" in got:
            errors.append(got["peak_gib"] / measured - 1)
            off = f"{errors[-1]:+.1%}"
        asked = [cell[key] for key in ("family", "precision", "mode", "gpu")]
        columns = [*asked, got.get("torch", ""), str(measured), said, off]
        rows.append(f"| {' | '.join(columns)} |")
    sizes = sorted(map(abs, errors)) or [0.0]
    figures = f"""
{len(errors)} cells have two peaks: the median error is {statistics.median(sizes):.1%}, 95 % are within \
{sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]:.1%}, {sum(size <= 0.02 for size in sizes)} within 2 %, and the \
worst is {sizes[-1]:.1%}. Of {len(verdicts)} cells out of memory, measured or emulated, {sum(verdicts)} agree.
"""
    table = "| family | precision | mode | GPU | torch | measured | emulated | off by |"
    source = f"Source: [SEGMENTED_CHECKPOINTING.md]({document['source']}), at {document['commit'][:7]}."
    parts = [HEAD.format(steps=STEPS), source, figures, table, f"|{' --- |' * 8}", *rows, ""]
    return "\n".join([*parts, kept(PAGE, NOTES)])


if __name__ == "__main__":
    main()
