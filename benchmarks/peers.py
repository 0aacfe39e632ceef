"""Scripts of other projects, as they stand, on emulated cards: writes benchmarks/peers.md.

python benchmarks/peers.py --projects FOLDER --data FOLDER --python NAME=PATH ... [ID ...]
python benchmarks/peers.py --beside --projects FOLDER --python NAME=PATH ... [--side SIDE] [ID ...]

peers.json says what is run and what its authors published. FOLDER/NAME is a checkout of each project at the commit
that is named there; nothing of them is here. `--python` names the interpreter of each environment: `bigdit` has what
this project installs, with a CUDA build of torch and torchvision; `2024`, `2023` and `finetrainers` have the versions
of cogvideox-factory's, of fast-DiT's and of finetrainers' time, and `simpletuner` what it asks for (Python 3.12). Found
figures are kept in peers_found.json, a row at a time, so that rows can be run again by their ids. The data is noise:
pictures in dog/ and imagenet/CLASS/, fast-DiT's features/, latents and embeddings in cogvideox/, mp4 files with their
prompts.txt and videos.txt in videos/; simpletuner.json is SimpleTuner's data backend of dog/, whose caches are empty;
icons/ has 23 pictures of 1024 × 1024 with a metadata.jsonl, hidream/ and llama/ the configs and tokenizers of
HiDream-I1-Dev, whose CLIPs have 248 positions, and Llama 3.1, and nf4.json what bitsandbytes is asked for.

With --beside bigdit trains what some of the scripts train, on the same cards: the rows of beside/rows.json, whose
figures are kept in beside/found.json. With `--side bigdit` the scripts' figures stay as they are: where bigdit has
changed, or, by what rows.json calls a script, where that has.
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

from beside.measured import OURS, Row
from beside.page import part

from bigdit.files import write_json, write_text
from bigdit.units import GIB

HERE = Path(__file__).parent
PAGE = HERE / "peers.md"
ROWS, FOUND = HERE / "peers.json", HERE / "peers_found.json"
BESIDE, FOUND_BESIDE = HERE / "beside/rows.json", HERE / "beside/found.json"
PEAK_SAID = re.compile(r"Memory before testing[\s\S]*?max_memory_reserved=([\d.]+) GB")
"""What cogvideox-factory's scripts print of torch's own peak, in GiB, since they began to train."""
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "timm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--projects", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--python", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--beside", action="store_true", help="bigdit's side of what they train, beside theirs")
    parser.add_argument("--side", help="that one side of the rows: bigdit, or a script as rows.json calls it")
    parser.add_argument("ids", nargs="*")
    asked = parser.parse_args()
    if not asked.beside and asked.data is None:
        parser.error("--data names the folder of what the scripts train on")
    pythons = dict(text.split("=", 1) for text in asked.python)
    projects = asked.projects.resolve()
    if asked.beside:
        train_beside(asked.ids, asked.side, projects, pythons)
        return
    document, found = _read(ROWS), _read(FOUND)
    for row in document["rows"]:
        if row["id"] in asked.ids or not asked.ids:
            found[row["id"]] = run(row, document["arguments"], projects, asked.data.resolve(), pythons)
            print(row["id"], json.dumps(found[row["id"]]), flush=True)
            found[row["id"]].pop("failed", None)
            write_json(FOUND, found)
            write_text(PAGE, page())


def train_beside(ids: list[str], only: str | None, projects: Path, pythons: dict[str, str]) -> None:
    """Both sides of the rows of these ids, or of all; `only` that one."""
    document = _read(BESIDE)
    for row in document["rows"]:
        if row["id"] in ids or not ids:
            with tempfile.TemporaryDirectory() as folder:
                sides = Row(document, row, projects, pythons, Path(folder))
                for side in (OURS, *row["theirs"]):
                    if side == only or only is None:
                        known = _read(FOUND_BESIDE).get(row["id"], {}).get(side, {}).get("largest")
                        took = sides.side(side, known)
                        found = _read(FOUND_BESIDE)  # anew: other sides may be found meanwhile
                        found.setdefault(row["id"], {})[side] = took
                        print(row["id"], side, json.dumps(took), flush=True)
                        write_json(FOUND_BESIDE, found)
                        write_text(PAGE, page())


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return read


def run(
    row: dict[str, Any], arguments: dict[str, str], projects: Path, data: Path, pythons: dict[str, str]
) -> dict[str, Any]:
    """One row's figures: in each of its runs, which are two where a loss is scaled, the highest process's peaks."""
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
    """The peaks of the process that took most, in GiB, and its optimizer steps."""
    cards = [(account, card) for account in run["accounts"] for card in account["cards"]]
    if not cards:
        return {"steps": 0}
    account, card = max(cards, key=lambda each: (each[0]["fits"] is False, each[1]["peak_reserved_bytes"]))
    process = card["process"]
    return {
        "steps": account["steps"],
        "out_of_memory": account["fits"] is False,
        "seconds": round(run["seconds"]),
        "allocated_gib": round(card["peak_allocated_bytes"] / GIB, 3),
        "reserved_gib": round(card["peak_reserved_bytes"] / GIB, 3),
        "process_gib": [round(process[end] / GIB, 3) for end in ("low_bytes", "high_bytes")],
        "phase": card["peak_phase"],
        "allocated_by_phase_gib": {
            phase["phase"]: round(phase["peak_allocated_bytes"] / GIB, 3) for phase in card["phases"]
        },
    }


def versions(python: str) -> dict[str, str]:
    """Installed versions of the libraries that decide, in that environment."""
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
    """peers.md: the tables, the versions and what is known of what differs."""
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
    return "\n".join(
        [
            HEAD,
            "| id | script | card | steps | allocated | reserved | process | published | emulated / published |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
            part(_read(BESIDE), _read(FOUND_BESIDE)),
            "",
            "## Projects and sources",
            "",
            *projects,
            *sources,
            "",
            "## Versions",
            "",
            *listed,
            "",
            NOTES,
            "",
        ]
    )


# What was found of rows that are far off, in the projects' own repositories and histories.
NOTES = """## What differs, and why

- cogvideox-factory, `print_memory` of the script itself on cogfactory-10: 12.945 GiB reserved before training, as
  published, and 21.812 at the peak, where 21.803 was published.
- cogfactory-13 was 46.086 (0.991) until emulated cards took what cuDNN works in where it cuts latents into patches: in
  16 bits copies of input, weight and result with channels last, here 440,687,763 bytes, a rule that an H100 gave
  (gpu_matrix.md). They are gone before the first block; but hidden states then lie where they were, and later two
  segments of 824 MiB more are reserved for rotated queries and keys, and one each of 834, 418 and 412 fewer. All six
  rows of CogVideoX-5b with LoRA at batch 4 in that README were off by as much. Published, without and with it: rank 16
  46.492, 46.086, 46.482, in 8 bits 46.320, 45.916, 46.312; rank 64 47.805, 47.398, 47.795, in 8 bits 46.820, 46.416,
  46.812; rank 256 47.268, 46.891, 47.285, in 8 bits 47.920, 47.545, 47.939. Where segments lie (addresses that rise,
  fall or are drawn by lot) moves none of the six by more than 1 MiB; with the result's copy alone nothing changes.
  `print_memory` of cogfactory-13 says 19.742 before training, and 46.482 before and after validation; published are
  19.742, 46.492 and 46.492.
- What that is not: torch of the time. 2.6.0 for CUDA 12.4, its host code run on an emulated card with stubs changed for
  CUDA 12, reserves what 2.13 does in seven rows with LoRA, to 2 MiB (46.086 here). Nor diffusers, whose CogVideoX is
  the same from 19 September to 21 October 2024; nor the first step skipped, nor three steps, nor four.
- The other rows with LoRA, played again with the workspace, published, without and with: 2b at batch 4, rank 16 21.803,
  21.818, 21.812, in 8 bits 21.734, 21.750, 21.744; rank 64 22.254, 22.270, 22.264, in 8 bits 21.941, 21.957, 21.951;
  rank 256 22.020, 22.041, 22.047. With nothing recomputed at batch 1, rank 16 43.764, 43.826, 43.828; rank 64 44.314,
  44.377, 44.443; rank 256 45.826, 45.824, 45.889. 5b at batch 1, rank 64 20.818, 20.725, 20.824; rank 256 22.119,
  22.109, 22.158. What is left there addresses decide, by which equally good blocks are told apart: 43.764 where they
  fall, 44.316, 22.119 and 45.889 to 46.102 where they are drawn. So it is with 2b, rank 256, 8-bit AdamW at batch 4:
  22.020 published, 21.264 or 22.291 by addresses (21.258 without the workspace).
- cogvideox-factory in full: the figures stand in the README of 3a519f5, four days after the LoRA ones; its script
  gives 46.055 / 33.221 at batch 4, where d81209b gives 46.029 / 33.344 (without the workspace for patches, as all
  figures of this point and of the next; with it batch 1, published at 33.934, is 34.057 / 33.996 instead of 34.340 /
  34.090). The repository's last `metrics.sh`, of 512a8a6 and for LoRA, takes two steps of AdamW in fp16. State is made
  in the first step that is taken; the forward pass after it finds the cached blocks cut up by gradients and by AdamW's
  square roots, and reserves new ones: 33.3 becomes 46.0. With 8-bit AdamW, and with AdamW on the host, batch 4 was
  published at 27.930 and 27.916: what backward reserves without state. So the authors' first step was skipped, and of
  1.246 and 0.973 the second is the one that holds.
- cogfactory-2b-full (AdamW, batch 4) is open: nothing that was tried gives 38.281. Both steps taken 46.03; the first
  skipped 33.28 to 33.34; three steps 46.8; with validation between the steps, as where an epoch has one batch, 40.33
  and 33.21. The history of allocations, played through the allocator's rules again, gives 39.7 with expandable
  segments, 47.1 with the cache emptied before AdamW, 40.9 with it emptied between the steps; other addresses give
  33.3, or 45.5 to 46.6. AdamW without `foreach` is ruled out by batch 1, where 33.934 has room for its square roots
  only; gradients cannot be accumulated, since the script then reads a norm that it has not computed. After validation
  batch 1 agrees as well (43.848 published, 43.953 / 43.566 emulated), and batch 4 does not (48.341; 46.086 / 40.828).
  When emulated, batch 4 takes less than batch 1 where the first step is skipped, since its cached blocks hold AdamW's
  state; the published figures rise.
- fastdit-3: its peak is the VAE's, at a batch of 128 in TF32. Without cuDNN's workspaces it was 1.072, and 0.971 with
  the first step skipped. With copies of input, weight and result, as an H200 takes them, the process takes 47.25 GiB at
  least, which is too much. So emulated cards of Ampere copy input and weight alone in TF32.
- diffusers-hidream-lora, -nf4: the peak is the VAE's, encoding in bf16 beside all encoders. Without the workspaces it
  was 59.682 and 36.658. Copies of input, weight and result are 512 MiB. The peak rises by half of it and the weight's:
  without them it lies where the residual is scaled, with 256 MiB more than at the convolution. What is left is 77,312
  bytes too much, and 6 MB with nf4.
- fastdit-4: its authors' log is of May 2023. timm's attention was not fused before 0.9 (a matrix of 256 × 256 for
  each head and sample, several times over), and accelerate 0.19 kept gradients as zeros between steps, where it now
  frees them. `fastdit-4-2023` is the same script with timm 0.6.13 and accelerate 0.19.0, on today's torch: that
  accounts for 2.3 of the 5.1 GiB. The rest may be torch's: AdamW of 2.0, the newest then, added epsilon out of place,
  and so held two copies of the size of all parameters where it now holds one. torch 2.0 cannot be emulated; with that
  second copy of 2.51 GiB put into the history of allocations, the allocator's rules reserve 26.33 for 23.61 (the
  first step skipped: 24.02 for 21.58). The process then takes 26.57 to 26.95, which is 0.997 of what was published
  (0.911). The versions that the authors had, and whether their first step was skipped, are not said.
- Rows without a published figure: the READMEs of these scripts state none. They are there to be run: diffusers'
  scripts under python and accelerate's launcher with DeepSpeed and FSDP, DiT's under torchrun. Those of SD3, SD3.5 and
  CogVideoX, and SD3 beside bigdit, were run before emulated cards took the workspace for patches."""


HEAD = """# Scripts of other projects on emulated cards

Made by `python benchmarks/peers.py`; peers.json has each command. The scripts are as they stand, their weights empty
(`--fake-weights`), their pictures and videos noise. In GiB. Kernels are not run: the peaks are those of PyTorch's own
allocator; process is reserved memory with what CUDA's context takes beside it. Where the loss is scaled, the second
figure is that of the first step skipped, as the scaler does on a real card.
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
    """The emulated figure over the published one, by the metric that was published, a run each."""
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
