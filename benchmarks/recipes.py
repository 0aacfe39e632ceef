"""Every recipe at full size on its emulated GPUs: recipes/measured.json.

    python benchmarks/recipes.py [--planned | --extract] [NAME…]

Each recipe extracts a few images, takes three steps, generates an image by its last command, and is planned. --planned
repeats the plans alone, and what the encoders take; --extract repeats extraction alone. Weights are holes in files,
which read as zeros. Images and cached latents are made up: what is allocated follows from shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from emulated import step_of
from PIL import Image
from tried.extraction import extraction, stages_of, waiting_bytes, weights_in
from tried.saved import saved

from bigdit import catalog
from bigdit.catalog import batch_shape
from bigdit.catalog.families import REFERENCE, class_count
from bigdit.checkpoint import latest
from bigdit.config.data import Bucket
from bigdit.config.run import RECEIPT, receipt_of
from bigdit.config.stages import load_run, load_stages
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.fake_weights import lay_out
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import guard
from bigdit.files import write_json
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Attempt, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.receipt import Receipt
from bigdit.recipes import MEASURED, DiskNeed, Extraction, Recipe, Took, names, recipe
from bigdit.search.answer import make_plan
from bigdit.search.plan import Plan, ResolvedRequest, host_need
from bigdit.search.resolve import resolve_request
from bigdit.speed.seconds import Cluster, Interval
from bigdit.store.part import EncodedRange, part_path, write_part
from bigdit.store.schema import FILE, StoreSchema, part_identity, schema_text, store_identity
from bigdit.store.store import write_null_text
from bigdit.store.text import Text
from bigdit.train.prepare import prepare

ROOT = Path(__file__).parent.parent
IMAGES = 100_000
STEPS = 3


class Caption:
    """One caption for all images."""

    text, weight = "a caption", 1.0


def main(arguments: list[str]) -> int:
    """Print a line a recipe as they finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes; all if left out")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--planned", action="store_true", help="the plans alone, and what the encoders take")
    alone.add_argument("--extract", action="store_true", help="what extraction takes alone")
    asked = parser.parse_args(arguments)
    took = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    recipes = [recipe(name) for name in asked.names or names()]
    if asked.planned:
        for found in recipes:
            planned_so = by_plan(found)
            took[found.name] |= planned_so
            write_json(MEASURED, took)
            print(f"{found.name}: {planned_so}", flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="bigdit-recipes-") as folder:
        hub = weights_of(recipes, Path(folder))
        for found in recipes:
            place = Path(folder) / found.name
            place.mkdir()
            if not asked.extract:
                took[found.name] = _tried(found, hub, place / "trained").model_dump(mode="json")
                print(f"{found.name}: reserves {took[found.name]['peak_reserved_bytes']} bytes", flush=True)
            of_extraction = extraction(found, hub, place)
            took[found.name]["extraction"] = of_extraction.model_dump(mode="json")
            write_json(MEASURED, dict(sorted(took.items())))
            print(f"{found.name}: {_said(of_extraction)}", flush=True)
            shutil.rmtree(place)
    return 0


def _said(found: Extraction) -> str:
    """What extraction took, beside what the encoders alone took."""
    allocated, alone = found.peak_allocated_bytes, found.emulated_bytes
    beside = "" if alone is None else f", {alone} by the encoders alone ({allocated / alone - 1:+.2%})"
    turns = "; memory ran out, and encoders took turns" if found.ran_out else ""
    return f"extraction allocates {allocated} bytes{beside}, and reserves {found.peak_reserved_bytes}{turns}"


def _tried(found: Recipe, hub: Path, folder: Path) -> Took:
    """Three steps, and an image."""
    receipts = trained(found, hub, folder)
    if found.generates:
        drawn(found, folder)
    return _took(found, receipts, folder)


def weights_of(recipes: Sequence[Recipe], folder: Path) -> Path:
    """A hub cache in `folder` with all weights. The libraries that write them take seconds to import."""
    gpu = catalog.resolve_gpu(recipes[0].about.gpu)
    repositories = sorted({each.about.repository for each in recipes})
    return Path(lay_out(repositories, folder, os.environ | emulated_environment(gpu))["HF_HUB_CACHE"])


def trained(found: Recipe, hub: Path, folder: Path) -> list[Receipt]:
    """Train three steps of each stage by `bigdit train` on emulated GPUs, with files in `folder`. A single process
    computes no values; several exchange theirs."""
    gpu, weights = catalog.resolve_gpu(found.about.gpu), weights_in(hub, found)
    folder.mkdir()
    arguments, changed = json.loads((weights / "transformer/config.json").read_text()), ["output=run"]
    for number, document in enumerate(stages_of(found)):
        make_store(folder / f"features-{number}", found.about.model, document, arguments)
        stage = f"stages.{number}." if found.stages > 1 else ""
        own = (f"data.features=features-{number}", f"train.steps={STEPS}", "train.warmup_steps=1")
        changed += [f"{stage}{each}" for each in own]
    (folder / f"{found.name}.yaml").write_text(found.text.replace(found.weights, str(weights)))
    with shared_state() as state:
        environment = os.environ | emulated_environment(gpu, found.processes, state, values=found.processes > 1)
        asked = [f"{found.name}.yaml", *(part for each in changed for part in ("--set", each))]
        _bigdit(folder, environment | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "train", "--config", *asked)
    return receipts_of(found, folder)


def receipts_of(found: Recipe, folder: Path) -> list[Receipt]:
    """The receipt of each stage that was `trained`."""
    names = [*map(receipt_of, range(found.stages - 1)), RECEIPT]
    return [Receipt.model_validate_json((folder / "run" / name).read_text()) for name in names]


def saved_by(found: Recipe, folder: Path) -> DiskNeed:
    """What the run in `trained` has saved, and how much the recipe's own steps will save."""
    newest, _ = latest(folder / "run")
    assert newest is not None
    return saved(newest, folder / "run", load_stages(MEASURED.parent / f"{found.name}.yaml"))


def drawn(found: Recipe, folder: Path) -> Path:
    """The image or video that the recipe's last command generates in two steps from what was `trained`."""
    _, *asked = shlex.split(found.commands[-1].replace(found.run["output"], "run"))
    Image.new("RGB", (64, 64)).save(folder / "fox.png")  # for edit models to edit
    _bigdit(folder, os.environ | emulated_environment(catalog.resolve_gpu(found.about.gpu)), *asked, "--steps", "2")
    (row,) = json.loads((folder / "run/samples/samples.json").read_text())["images"]
    return folder / "run/samples" / str(row["file"])


def _bigdit(folder: Path, environment: dict[str, str], *arguments: str) -> None:
    """Run a command of bigdit with the CUDA build of torch."""
    command = [str(cuda_python()), "-W", "ignore", "-c", "from bigdit.cli import main; main()", *arguments]
    own = environment | {"PYTHONPATH": os.pathsep.join((str(ROOT), environment["PYTHONPATH"]))}
    subprocess.run(command, env=own, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def first_of_many(found: Recipe) -> dict[Bucket, Attempt]:
    """Two steps by the recipe's first process, by bucket. The others do not exist."""
    gpu = catalog.resolve_gpu(found.about.gpu)
    with EmulatedGpus(gpu) as cards:
        return {size: cards.attempt(request, gpu.usable_bytes) for size, request in requests(found).items()}


def requests(found: Recipe) -> dict[Bucket, StepRequest]:
    """The recipe's strategy by bucket, with two micro-batches a step if it allows them. Training reads its YAML in
    the same way."""
    gpu, model = catalog.resolve_gpu(found.about.gpu), catalog.model(found.about.model)
    run = load_run(MEASURED.parent / f"{found.name}.yaml")
    prepare(run)
    strategy = run.strategy
    if not strategy.optimizer_in_backward:
        strategy = strategy.sized(strategy.step_size.model_copy(update={"grad_accum_steps": 2}))
    asked: dict[Bucket, StepRequest] = {}
    for bucket in run.data.buckets:
        *frames, height, width = bucket
        asked[bucket] = request_for(model, gpu, strategy, resolution=(height, width), frames=next(iter(frames), None))
    return asked


def make_store(root: Path, name: str, document: dict[str, Any], arguments: dict[str, Any], each: int = 16) -> None:
    """Write a cache of zeros for this model: so many samples a bucket, with captions that fill all tokens, or all of
    class 0."""
    model, data = catalog.model(name), document["data"]
    buckets = [tuple(size) for size in data["buckets"]]
    tokens = document["encoders"]["text"].get("max_tokens", model.text.tokens) if model.text else 0
    schema = StoreSchema(
        codec={},
        text_encoder={"max_tokens": tokens} if tokens else {},
        buckets=buckets,
        sources=[{"kind": "made up", "count": each * len(buckets)}],
        part_size=each * len(buckets),
        classes=None if tokens else class_count(model.spec),
        fps=data.get("fps"),
        references=data.get("references", 0),
    )
    root.mkdir()
    (root / FILE).write_text(schema_text(schema))
    latents, indices = {}, {}
    for number, (*frames, height, width) in enumerate(buckets):
        shape = batch_shape(model, (height, width), *frames).latents
        latents[shape] = torch.zeros((each, *shape), dtype=torch.bfloat16)
        indices[shape] = list(range(number * each, (number + 1) * each))
    edited = {shape: {REFERENCE: each[:, None]} for shape, each in latents.items()} if schema.references else None
    encoded = EncodedRange(latents, indices, {}, {}, [], dict.fromkeys(range(schema.count), 0))
    if model.text:
        null, text = (_text(length, model.text.dim, arguments) for length in (1, tokens))
        write_null_text(root, lambda: null, store_identity(schema))
        captions: dict[int, Any] = {index: (Caption(),) for index in range(schema.count)}
        encoded = EncodedRange(latents, indices, captions, {Caption.text: text}, [], frames=edited)
    write_part(part_path(root, 0, schema.count), encoded, identity=part_identity(schema, 0))


def _text(tokens: int, dim: int | None, arguments: dict[str, Any]) -> Text:
    assert dim is not None
    pooled = arguments.get("pooled_projection_dim")
    return Text(torch.zeros(tokens, dim), None if pooled is None else torch.zeros(pooled))


def _took(found: Recipe, receipts: Sequence[Receipt], folder: Path) -> Took:
    gpu = catalog.resolve_gpu(found.about.gpu)
    beside = non_torch_memory_of(receipts[0].strategy, gpu)
    reserved = max(each.measured_peak_reserved_bytes or 0 for each in receipts)
    return Took(
        torch=cuda_build(cuda_python()),
        peak_allocated_bytes=max(each.measured_peak_allocated_bytes or 0 for each in receipts),
        peak_reserved_bytes=reserved,
        process_bytes=(reserved + beside.low_bytes, reserved + beside.high_bytes),
        usable_bytes=gpu.usable_bytes,
        saved=saved_by(found, folder),
        **by_plan(found),
    )


def by_plan(found: Recipe) -> dict[str, Any]:
    """What plans and encoders predict for all stages, by the names in Took."""
    plans = [planned(found, document) for document in stages_of(found)]
    stores = [plan.dataset.store_bytes for plan in plans if plan.dataset]
    encoding = [plan.dataset.extraction_seconds for plan in plans if plan.dataset and plan.dataset.extraction_seconds]
    host_bytes, seconds = _needs(found, plans)
    return {
        "host_bytes": host_bytes,
        "store_bytes": (round(sum(each.low for each in stores)), round(sum(each.high for each in stores))),
        "hours": _hours(seconds),
        "encoding_hours": _hours(encoding) if len(encoding) == len(plans) else None,
        "waiting_bytes": waiting_bytes(found),
    }


def _hours(seconds: Sequence[Interval]) -> tuple[float, float]:
    low, high = (sum(each) / 3600 for each in zip(*((each.low, each.high) for each in seconds), strict=True))
    return round(low, 2), round(high, 2)


def _needs(found: Recipe, plans: Sequence[Plan]) -> tuple[int, list[Interval]]:
    """Bytes of CPU memory, and seconds, of each stage: by plans, or by a profile if blocks are swapped."""
    strategy = found.run["strategy"]
    if "blocks_to_swap" not in strategy:
        return max(plan.host.node_bytes for plan in plans), [plan.run.seconds for plan in plans if plan.run]
    request = requests(found)[tuple(found.run["data"]["buckets"][0])]
    gpu, accumulated = plans[0].request.gpu, strategy["global_batch_size"] // strategy["micro_batch_size"]
    with EmulatedGpus(gpu) as cards:
        profile, attempt = cards.profile(request), cards.attempt(request, counted="step")
    host = host_need(profile.host_timeline, profile.checkpoint_bytes, Cluster())
    step = step_of(attempt, request.strategy, gpu, grad_accum_steps=accumulated)
    return host.node_bytes, [step.seconds * found.run["train"]["steps"]]


def planned(found: Recipe, document: dict[str, Any]) -> Plan:
    """The plan for a stage's own strategy and steps, at the first of its sizes."""
    return make_plan(request_of(found, document))


def request_of(found: Recipe, document: dict[str, Any]) -> ResolvedRequest:
    """The request for a stage's plan."""
    train, strategy = document["train"], document["strategy"]
    *frames, height, width = document["data"]["buckets"][0]
    return resolve_request(
        model=found.about.model,
        gpu=found.about.gpu,
        gpus=found.processes,
        engine=_engine(found),
        resolution=[(height, width)],
        frames=frames[0] if frames else None,
        optimizer="adamw",
        micro_batch=strategy["micro_batch_size"],
        global_batch=strategy["global_batch_size"],
        checkpointed_blocks=strategy.get("checkpointed_blocks", 0),
        lora=strategy["lora"]["rank"] if "lora" in strategy else None,
        lora_base=strategy["lora"].get("base") if "lora" in strategy else None,
        images=IMAGES,
        epochs=train["steps"] * strategy["global_batch_size"] / IMAGES,
        host_memory="1TiB",
    )


def _engine(found: Recipe) -> str:
    """The name of its preset."""
    document = found.run["strategy"].get("ds_config")
    return f"zero{document['zero_optimization']['stage']}" if document else "single"


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
