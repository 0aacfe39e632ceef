"""Scripts of other projects, as they stand, on emulated GPUs: writes benchmarks/peers.md.

python benchmarks/peers.py --projects FOLDER --data FOLDER --python NAME=PATH ... [ID ...]

peers.json says what is run and what its authors published. FOLDER/NAME is a checkout of each project at the commit
that is named there; nothing of them is here. `--python` names the interpreter of each environment: `bigdit` has what
this project installs, with a CUDA build of torch and torchvision; `2024`, `2023` and `finetrainers` have the versions
of cogvideox-factory's, of fast-DiT's and of finetrainers' time, and `simpletuner` what it asks for (Python 3.12). Found
figures are kept in peers_found.json, a row at a time, so that rows can be run again by their ids. The data is noise:
images in dog/ and imagenet/CLASS/, fast-DiT's features/, latents and embeddings in cogvideox/, mp4 files with their
prompts.txt and videos.txt in videos/; simpletuner.json is SimpleTuner's data backend of dog/, whose caches are empty;
icons/ has 23 images of 1024 × 1024 with a metadata.jsonl, hidream/ and llama/ the configs and tokenizers of
HiDream-I1-Dev, whose CLIPs have 248 positions, and Llama 3.1, and nf4.json what bitsandbytes is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pages import kept

from bigdit.files import write_json, write_text
from bigdit.units import GIB

HERE = Path(__file__).parent
PAGE = HERE / "peers.md"
ROWS, FOUND = HERE / "peers.json", HERE / "peers_found.json"
NOTES = "## What differs, and why"
TABLE = "| id | script | GPU | steps | allocated | reserved | process | published | emulated / published |"
PEAK_SAID = re.compile(r"Memory before testing[\s\S]*?max_memory_reserved=([\d.]+) GB")
"""The peak that cogvideox-factory's scripts print, in GiB, since training began."""
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "timm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--projects", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--python", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("ids", nargs="*")
    asked = parser.parse_args()
    pythons = dict(text.split("=", 1) for text in asked.python)
    projects = asked.projects.resolve()
    document, found = _read(ROWS), _read(FOUND)
    for row in document["rows"]:
        if row["id"] in asked.ids or not asked.ids:
            found[row["id"]] = run(row, document["arguments"], projects, asked.data.resolve(), pythons)
            print(row["id"], json.dumps(found[row["id"]]), flush=True)
            found[row["id"]].pop("failed", None)
            write_json(FOUND, found)
            write_text(PAGE, page())


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return read


def run(
    row: dict[str, Any], arguments: dict[str, str], projects: Path, data: Path, pythons: dict[str, str]
) -> dict[str, Any]:
    """The figures of a row's runs: the highest peaks of any process. There are two runs if a loss is scaled."""
    python = pythons[row["environment"]]
    with tempfile.TemporaryDirectory() as out:
        text = re.sub(r"@([\w-]+)", lambda name: arguments[name[1]], row["command"]).format(data=data, out=out)
        command = [str(Path(sys.executable).with_name("bigdit")), "emulate", "--gpu", row["gpu"], "--json"]
        command += ["--processes", str(row.get("cards", 1))]
        command += ["--steps", str(row["steps"])] if "steps" in row else []
        for name in row["fake"]:
            command += ["--fake-weights", name.format(data=data)]
        command += ["--", python, *shlex.split(text)]
        folder = projects / row["project"] / row.get("folder", "")
        environment = os.environ | row.get("variables", {})
        environment |= {"PYTHONPATH": row["pythonpath"]} if "pythonpath" in row else {}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not done.stdout.strip():
        return {"failed": done.stderr[-8000:]}
    report = json.loads(done.stdout)
    said = [float(text) for text in PEAK_SAID.findall(done.stderr)]
    found: dict[str, Any] = {"fits": report["fits"], "exit_status": report["exit_status"], "versions": versions(python)}
    found["runs"] = [figures(each) for each in report["runs"]]
    if said:
        found["said_gib"] = said
    if report["exit_status"] not in (0, 2):
        found["failed"] = done.stderr[-2000:]
    return found


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Peaks of the process that took most, in GiB, and its optimizer steps."""
    gpus = [(account, gpu) for account in run["accounts"] for gpu in account["gpus"]]
    if not gpus:
        return {"steps": 0}
    account, gpu = max(gpus, key=lambda each: (each[0]["fits"] is False, each[1]["peak_reserved_bytes"]))
    process = gpu["process"]
    return {
        "steps": account["steps"],
        "out_of_memory": account["fits"] is False,
        "seconds": round(run["seconds"]),
        "allocated_gib": round(gpu["peak_allocated_bytes"] / GIB, 3),
        "reserved_gib": round(gpu["peak_reserved_bytes"] / GIB, 3),
        "process_gib": [round(process[end] / GIB, 3) for end in ("low_bytes", "high_bytes")],
        "phase": gpu["peak_phase"],
        "allocated_by_phase_gib": {
            phase["phase"]: round(phase["peak_allocated_bytes"] / GIB, 3) for phase in gpu["phases"]
        },
    }


def versions(python: str) -> dict[str, str]:
    """Versions in that environment of the libraries that matter."""
    code = f"""
import importlib.metadata as metadata, json
found = {{}}
for name in {LIBRARIES!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def page() -> str:
    """peers.md: the tables, the versions and what is known of the differences."""
    document, found = _read(ROWS), _read(FOUND)
    lines = [line(row, found[row["id"]]) for row in document["rows"] if row["id"] in found]
    used: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        used.setdefault(row["environment"], {}).update(found.get(row["id"], {}).get("versions", {}))
    listed = [
        f"- `{name}`: {', '.join(f'{library} {version}' for library, version in each.items())}"
        for name, each in sorted(used.items())
        if each
    ]
    projects = [
        f"- [{name}]({each['repository']}/tree/{each['commit']}) at {each['commit'][:7]}"
        for name, each in document["projects"].items()
    ]
    sources = [f"- {name}: {text}" for name, text in document["sources"].items()]
    parts = [HEAD, TABLE, f"|{' --- |' * 9}", *lines, "", "## Projects and sources", "", *projects, *sources]
    return "\n".join([*parts, "", "## Versions", "", *listed, "", kept(PAGE, NOTES)])


HEAD = """# Scripts of other projects on emulated GPUs

Made by `python benchmarks/peers.py`; peers.json has each command. The scripts are as they stand, their weights empty
(`--fake-weights`), their images and videos noise. In GiB. Kernels are not run: the peaks are those of PyTorch's own
allocator; process is reserved memory with what CUDA's context takes beside it. Where the loss is scaled, the second
figure is that of the first step skipped, as the scaler does on a real GPU.
"""


def line(row: dict[str, Any], found: dict[str, Any]) -> str:
    script = next(word for word in row["command"].split() if word.endswith(".py"))
    card = f"{row['cards']} × {row['gpu']}" if row.get("cards", 1) > 1 else row["gpu"]
    runs = found.get("runs", [])
    if not runs or not any(each["steps"] or each.get("out_of_memory") for each in runs):
        return f"| {row['id']} | {row['project']}: `{script}` | {card} | – | did not run | | | | |"
    columns = [
        " / ".join("OOM" if each.get("out_of_memory") else f"{each[name]:.2f}" for each in runs)
        for name in ("allocated_gib", "reserved_gib")
    ]
    process = " / ".join("OOM" if each.get("out_of_memory") else _between(each["process_gib"]) for each in runs)
    published = row.get("published") or (f"{row['published_gib']:.3f}" if row.get("published_gib") else "–")
    steps = max(each["steps"] for each in runs)
    cells = [row["id"], f"{row['project']}: `{script}`", card, str(steps), *columns, process, published]
    return f"| {' | '.join(cells)} | {' / '.join(_ratios(row, found))} |"


def _ratios(row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Emulated over published, by the metric that was published, for each run."""
    if row.get("published") == "out of memory":
        return ["agrees" if found["fits"] is False else "contradicts"]
    published = row.get("published_gib")
    if not published:
        return ["–"]
    if row.get("metric") == "allocated":
        values = [each["allocated_gib"] for each in found["runs"]]
    elif row.get("metric") == "process":
        values = [sum(each["process_gib"]) / 2 for each in found["runs"] if not each.get("out_of_memory")]
    else:
        values = found.get("said_gib") or [each["reserved_gib"] for each in found["runs"]]
    return [f"{value / published:.3f}" for value in values] or ["OOM"]


def _between(ends: list[float]) -> str:
    low, high = ends
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}–{high:.2f}"


if __name__ == "__main__":
    main()
