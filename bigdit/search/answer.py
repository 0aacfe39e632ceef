"""The plan for a request, from the cache or made on emulated GPUs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bigdit.cache import Cache, digest_of, installed
from bigdit.catalog import FAMILIES, batch_shape
from bigdit.catalog.names import revision
from bigdit.config.plan_file import Fewer
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.emulator.launch import compile_caches
from bigdit.profile.attempt import Attempt, AttemptJob
from bigdit.profile.gpus import SOURCES, EmulatedGpus
from bigdit.receipt import Receipt
from bigdit.search.calibration import Calibration, check, own_receipts
from bigdit.search.plan import DatasetNeed, Estimate, Plan, ResolvedRequest, WholeRun, uncounted
from bigdit.strategy import BatchShape

if TYPE_CHECKING:
    from bigdit.search.planner import Planner

PLANS = Cache("plans", Plan, "the plan", "the plan is made")

_SOURCES = ("search", "speed", "catalog", "config", *SOURCES)
"""A cached plan is valid for these sources."""


def make_plan(request: ResolvedRequest, *, progress: Callable[[str], None] = lambda line: None) -> Plan:
    """The plan for `request`, cached for the same versions, catalogue and receipts.

    `progress` is called with a line for each stage. Raises UserError if the model cannot be planned.
    """
    own, notices = own_receipts(request.gpu, request.receipts)
    known = request.model_dump_json(), installed(), revision(), digest_of(*_SOURCES), cuda_build(cuda_python())
    key = (*known, *(receipt.digest() for receipt in own))
    plan = PLANS.find(key)
    if plan is None:
        with EmulatedGpus(request.gpu) as gpus:  # its process imports libraries while this one imports the search
            plan, lasts = compute_plan(request, own, gpus, progress)
        if lasts:
            PLANS.keep(key, plan)
    return plan.noted(notices)  # not cached: they are about files that do not decide the plan


def compute_plan(
    request: ResolvedRequest, own: Sequence[Receipt], gpus: EmulatedGpus, say: Callable[[str], None]
) -> tuple[Plan, bool]:
    """The plan for `request` from emulated GPUs and `own`, the GPU's receipts; and whether it may be cached.

    It may not if an attempt timed out or died, perhaps only because the machine was busy. `say` is called with a line
    for each stage. Raises UserError if the model has no step.
    """
    from bigdit.search.planner import Planner, Progress  # late: it imports numpy, which a cached plan does not need

    began = time.perf_counter()
    asked = hashlib.sha256(f"{request.model_dump_json()} {gpus.build}".encode()).hexdigest()[:32]
    compiled_before = Path(compile_caches()["TORCHINDUCTOR_CACHE_DIR"], f"plan-{asked}")  # goes with the code
    gpus.knows_code = compiled_before.exists()
    compiled = f", its blocks compiled at each size{'' if gpus.knows_code else ': minutes the first time'}"
    progress = Progress(f"planning the training of {request.model.name}{compiled * request.constraints.compile}", say)
    gpus.done = progress.count
    progress.begin("which engines and settings fit")
    checked, more = check(own, gpus)
    calibration = Calibration(checked, routed=FAMILIES[request.model.spec.class_name].routed)
    plan = _plan(Planner(request, gpus, calibration, progress))
    if request.constraints.compile:
        with suppress(OSError):  # without it, the next plan announces minutes again
            compiled_before.touch()
    unanswered = [f"not run on an emulated GPU: {why}" for why in gpus.unanswered]
    seconds = round(time.perf_counter() - began, 3)
    return plan.model_copy(update={"seconds": seconds}).noted([*more, *unanswered]), not unanswered


def _plan(planner: Planner) -> Plan:
    from bigdit.search.explain import fixes, waterfall
    from bigdit.search.rows import curves, every, front, runs, same_kernels, smaller
    from bigdit.search.solve import search

    asked = planner.request
    batch = batch_shape(asked.model, asked.resolution, asked.frames)
    chosen = search(planner)
    request, profile = planner.request, planner.profiles[chosen.title]
    planner.progress.begin("the fastest alternatives")
    rows = front(planner, chosen)
    unverified = request.model.unverified
    assumed = [] if unverified is None else [f"not verified of {request.model.name}: {unverified}"]
    steps, notices = waterfall(planner, chosen) if request.explain else ((), ())
    ran: list[Estimate] = []
    if not request.short_of_host(chosen.host_bytes):  # else no micro-batch fits
        planner.progress.begin("the largest micro-batches")
        if chosen.title not in planner.limits:
            planner.find_limits(chosen)
        if (largest := planner.limits[chosen.title].get(request.resolution)) is not None:
            ran = runs(planner, chosen, largest)
    fits = chosen.verdict != "DOES NOT FIT"
    if not fits:
        planner.progress.begin("what would fit")
    return Plan(
        request=asked,
        params=profile.params,
        batch=batch,
        verdict=chosen.verdict,
        margin=planner.calibration.margin,
        chosen=next(row for row in rows if row.title == chosen.title),
        ledger=profile.ledger,
        packed_timeline=profile.packed_timeline,
        host=planner.host(profile),
        front=rows,
        passed_over=None if planner.passed_over is None else planner.passed_over.title,
        rejected=tuple(planner.rejected),
        buckets=tuple(planner.limits.get(chosen.title, {}).values()),
        curves=curves(planner, chosen, ran),
        ran=every(planner, chosen, rows, ran),
        same_kernels=same_kernels(planner),
        smaller=smaller(planner, chosen),
        without_machine=(fewer := _without_machine(planner, chosen)),
        fixes=() if fits else fixes(planner, chosen),
        dataset=_dataset(planner, batch),
        run=_run(request, chosen),
        waterfall=steps,
        calibration=planner.calibration.source(chosen.strategy),
        notices=(*assumed, *uncounted(request.samples), *profile.notices, *notices, *([str(fewer)] if fewer else [])),
        versions=profile.versions | {"torch": planner.gpus.build.split()[0]},
        emulated=planner.gpus.build,
        catalogue=revision(),
        seconds=1.0,
    )


def _without_machine(planner: Planner, chosen: Estimate) -> Fewer | None:
    """The run without one of its machines, where there are several and it fits."""
    left, size = chosen.strategy.world_size - planner.request.cluster.gpus_per_node, chosen.strategy.global_batch_size
    over = chosen.strategy.over(left)
    strategy = chosen.strategy.model_copy(update=over)
    if left < 1 or left % strategy.cp or left % max(strategy.dp_replicate, 1) or chosen.verdict == "DOES NOT FIT":
        return None
    found = planner.unlimited([strategy])[0]
    if not isinstance(found, Attempt):
        return None
    needs = planner.reserving(found.peak_reserved_bytes, planner.non_torch(strategy))
    taken = needs["process"].low_bytes, needs["process"].high_bytes
    return Fewer(**over, global_batch_size=size, verdict=needs["verdict"], process_bytes=taken)


def _dataset(planner: Planner, batch: BatchShape) -> DatasetNeed | None:
    from bigdit.search.dataset import dataset_need, encoding_requests

    if planner.request.images is None:
        return None
    requests = encoding_requests(planner.request)
    attempts = planner.gpus.attempts([AttemptJob(request=request) for request in requests.values()])
    found = {samples: each for samples, each in zip(requests, attempts, strict=True) if isinstance(each, Attempt)}
    return dataset_need(planner.request, batch, found if len(found) == len(requests) else {})


def _run(request: ResolvedRequest, chosen: Estimate) -> WholeRun | None:
    if request.images is None:
        return None
    images, size = request.images - request.validated, chosen.strategy.global_batch_size
    return WholeRun.of(images, request.epochs, size, chosen.step, request.cluster.gpus, request.price)
