"""What fits GPUs of 12 to 80 GB, a table for each model of docs/quickstarts.md: `python benchmarks/quickstarts.py`.

Each row is what `bigdit plan` answers. It asks one after another, and keeps answers in quickstarts.json. With --keep it
asks only what is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import NonNegativeInt

from bigdit.catalog import find_model
from bigdit.catalog.families import objective_of
from bigdit.catalog.models import repositories
from bigdit.errors import UserError, guard
from bigdit.files import write_json, write_text
from bigdit.objective_spec import ObjectiveSpec
from bigdit.recipes import beginning
from bigdit.report.words import number
from bigdit.strategy import Strict
from bigdit.units import GIB

HERE = Path(__file__).parent
FOUND, PAGE = HERE / "quickstarts.json", HERE.parent / "docs/quickstarts.md"

GPUS = {"rtx-3060-12g": 12, "rtx-4080": 16, "rtx-4090": 24, "a40": 48, "a100-80g-sxm": 80}
"""The GPUs that stand for a size, in GB."""
BOTH, FULL, LORA = ("LoRA", "full"), ("full",), ("LoRA",)
OPTIONS = {"LoRA": ("--lora", "16"), "full": ("--full",)}
MODELS = {
    "sana-1600m-1024": BOTH,
    "sana-600m-1024": FULL,
    "pixart-sigma-xl-2-1024": FULL,
    "sd3.5-medium": BOTH,
    "flux.1-dev": BOTH,
    "qwen-image": LORA,
    "z-image": LORA,
    "wan2.1-t2v-1.3b": LORA,
    "wan2.2-ti2v-5b": LORA,
    "dit-xl-2": FULL,
}


class Answer(Strict):
    """What a plan recommends. Bytes of the process are the most that nvidia-smi shows. `samples_per_second` is (low,
    high). `fixes`: what would fit if nothing does."""

    model: str
    gpu: str
    way: str
    verdict: str
    title: str
    lossless: bool
    process_bytes: NonNegativeInt
    host_bytes: NonNegativeInt
    samples_per_second: tuple[float, float]
    fixes: tuple[str, ...]
    torch: str

    @property
    def asked(self) -> tuple[str, str, str]:
        return self.model, self.gpu, self.way


def command(model: str, gpu: str, way: str) -> list[str]:
    return ["bigdit", "plan", "--model", model, "--gpu", gpu, *OPTIONS[way], "--buckets", "none", "--json"]


def asked() -> Iterator[tuple[str, str, str]]:
    for model, ways in MODELS.items():
        yield from ((model, gpu, way) for way in ways for gpu in GPUS)


def answer(model: str, gpu: str, way: str) -> Answer:
    """The plan of today. Raises UserError if there is none."""
    words = command(model, gpu, way)
    done = subprocess.run([Path(sys.executable).with_name(words[0]), *words[1:]], capture_output=True, text=True)
    if done.returncode not in (0, 2):
        raise UserError(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")
    plan = json.loads(done.stdout)
    chosen = plan["chosen"]
    speed = chosen["samples_per_second_per_gpu"]
    return Answer(
        model=model,
        gpu=gpu,
        way=way,
        verdict=plan["verdict"],
        title=chosen["title"],
        lossless=chosen["lossless"],
        process_bytes=chosen["process"]["high_bytes"],
        host_bytes=chosen["host_bytes"],
        samples_per_second=(speed["low"], speed["high"]),
        fixes=tuple(str(fix) for fix in plan["fixes"]),
        torch=plan["versions"]["torch"],
    )


def table(model: str, found: dict[tuple[str, str, str], Answer]) -> str:
    """A model's rows: one for each GPU and way."""
    lines = [
        "| GPU | train | settings | GPU memory | CPU memory | samples/s |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for gpu, gb in GPUS.items():
        rows = [found[model, gpu, way] for way in MODELS[model] if (model, gpu, way) in found]
        lines += [f"| {gb} GB, `{gpu}` | {shown(row)} |" for row in rows]
    return "\n".join(lines)


def shown(row: Answer) -> str:
    if row.verdict == "DOES NOT FIT":
        return f"{row.way} | does not fit | – | – | –"
    speed = "–".join(map(number, row.samples_per_second))
    title = row.title.removeprefix("single GPU, ") + ("" if row.lossless else " †")
    title += " (tight)" if row.verdict == "TIGHT" else ""
    return f"{row.way} | {title} | {row.process_bytes / GIB:.1f} GiB | {row.host_bytes / GIB:.0f} GiB | {speed}"


def starts() -> str:
    """A row for each model: its weights, and how its run.yaml begins in recipes and the catalogue."""
    lines = ["| model | weights | objective | LoRA | full fine-tuning |", "| --- | --- | --- | --- | --- |"]
    for model, ways in MODELS.items():
        cells = [begun(model, way) if way in ways else "–" for way in OPTIONS]
        objective = objective_of(find_model(model).spec, None)
        lines.append(f"| `{model}` | `{repositories(model)[0]}` | {named(objective)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def begun(model: str, way: str) -> str:
    start = beginning(model, lora=way == "LoRA")
    return f"{start.lr:.0e}, {start.steps:,} steps".replace("e-0", "e-")


def named(objective: ObjectiveSpec) -> str:
    if objective.name == "ddpm":
        return f"DDPM, {objective.prediction}"
    shift = objective.shift
    if isinstance(shift, float):
        return f"flow matching, shift {shift:g}"
    by = f"√(tokens / {shift.base_tokens})" if shift.name == "sqrt" else f"μ {shift.base_mu:g} to {shift.max_mu:g}"
    return f"flow matching, shift by tokens, {by}"


def written(page: str, found: dict[tuple[str, str, str], Answer]) -> str:
    """The page with its tables, each between `<!-- fits MODEL -->`, or `<!-- starts -->`, and `<!-- end -->`."""

    def made(place: re.Match[str]) -> str:
        return f"{place[1]}\n{table(place[2], found) if place[2] else starts()}\n\n{place[3]}"

    return re.sub(r"(<!-- (?:fits (.+?)|starts) -->\n).*?(<!-- end -->)", made, page, flags=re.DOTALL)


def answers() -> dict[tuple[str, str, str], Answer]:
    """The answers in quickstarts.json."""
    known = json.loads(FOUND.read_text()) if FOUND.exists() else []
    return {each.asked: each for each in map(Answer.model_validate, known)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="ask only what quickstarts.json does not have")
    keep, found = parser.parse_args().keep, answers()
    for each in asked():
        if not keep or each not in found:
            found[each] = answer(*each)
            print(*each, found[each].verdict, found[each].title, sep=", ", flush=True)
            write_json(FOUND, [found[each].model_dump(mode="json") for each in asked() if each in found])
    write_text(PAGE, written(PAGE.read_text(), found))


if __name__ == "__main__":
    sys.exit(guard(main))
