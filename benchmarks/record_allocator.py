"""Play traces through the real caching allocator of a GPU, and write down what it did, into tests/measured.

python benchmarks/record_allocator.py [--model sana-1600m-1024 --gpu h200-sxm]

Needs a GPU with nothing else on it. Each recording runs in a process of its own: a made-up trace of many sizes on
three streams, on a card with room and on one without, and with --model its training step as rehearsed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from bigdit.memory.allocator import Playback, replay
from bigdit.memory.caching import OutOfMemory

from bigdit.files import write_text
from bigdit.memory import Block, Span, Timeline
from bigdit.spec import Strategy, Strict
from bigdit.units import GIB, KIB, MIB

FOLDER = Path(__file__).parents[1] / "tests/measured"


class Recording(Strict):
    """What a real allocator did with a timeline, and where.

    `reserved_changes`: (event, bytes reserved after it) wherever these changed. `memory_stats` are those of
    torch.cuda.memory_stats at the end that are not 0. `failed_event` ran out of memory, and the trace ends there.
    """

    gpu: str
    driver: str
    versions: dict[str, str]
    expandable_segments: bool
    capacity_bytes: int
    packed_timeline: str
    reserved_changes: tuple[tuple[int, int], ...]
    memory_stats: dict[str, int]
    failed_event: int | None

    def differences(self) -> list[str]:
        """Where a replay does not come to what was measured."""
        timeline = Timeline.unpack(self.packed_timeline)
        changes: list[tuple[int, int]] = []
        playback = Playback(timeline, self.capacity_bytes, expandable_segments=self.expandable_segments)
        failed, peak, reserved = None, 0, 0
        for at in range(len(timeline.events)):
            try:
                playback.step(at)
            except OutOfMemory:
                failed = at
            peak = max(peak, playback.allocator.allocated_bytes)
            if playback.device.reserved_bytes != reserved:
                reserved = playback.device.reserved_bytes
                changes.append((at, reserved))
            if failed is not None:
                break
        stats = defaultdict(int, self.memory_stats)
        pairs = [
            ("the failed event", self.failed_event, failed),
            ("peak allocated bytes", stats["allocated_bytes.all.peak"], peak),
            ("peak reserved bytes", stats["reserved_bytes.all.peak"], playback.device.peak_reserved_bytes),
            ("cache flushes", stats["num_alloc_retries"], playback.allocator.cache_flushes),
            ("reserved bytes", *_first_difference(self.reserved_changes, tuple(changes))),
        ]
        return [f"{what}: measured {a}, replayed {b}" for what, a, b in pairs if a != b]


def _first_difference(measured: tuple, replayed: tuple) -> tuple[object, object]:
    for a, b in zip(measured, replayed, strict=False):
        if a != b:
            return a, b
    return measured[len(replayed) :][:1], replayed[len(measured) :][:1]


def made_up_trace(seed: int, blocks: int = 4000, live: int = 60) -> Timeline:
    """Blocks of all size classes on three streams; about `live` at once, in two phases."""
    source = random.Random(seed)
    made: list[Block] = []
    events: list[int] = []
    alive: list[int] = []
    for number in range(1, blocks + 1):
        largest = source.choice((4 * KIB, MIB, 12 * MIB, 12 * MIB, 80 * MIB))
        made.append(Block(source.randint(1, largest), "temporary", "made up", source.choice((0, 0, 1, 2))))
        alive.append(number)
        events.append(number)
        while len(alive) > live or (alive and source.random() < 0.3):
            events.append(-alive.pop(source.randrange(len(alive))))
    half = len(events) // 2
    return Timeline(tuple(made), tuple(events), (Span("first", 0, half), Span("second", half, len(events))))


def rehearsed_trace(model: str, gpu: str) -> Timeline:
    """Two training steps of a model of the catalogue at micro-batch 1, in bf16 with AdamW."""
    from bigdit.rehearse import rehearse

    from bigdit import catalog
    from bigdit.profile.request import request_for

    return rehearse(request_for(catalog.model(model), catalog.gpu(gpu), Strategy())).sizes[0].timeline


def record(timeline: Timeline, capacity_bytes: int | None, expandable_segments: bool, file: Path) -> None:
    """Do `timeline` with torch's allocator, held to `capacity_bytes`, and write the Recording.

    The process is a fresh one: the allocator reads its settings once.
    """
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable_segments}"
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    if capacity_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(capacity_bytes / total)
    streams = {0: torch.cuda.default_stream()}
    tensors: dict[int, torch.Tensor] = {}
    changes: list[tuple[int, int]] = []
    failed, reserved = None, 0
    for at, event in enumerate(timeline.events):
        if event < 0:
            del tensors[-event]
        else:
            block = timeline.blocks[event - 1]
            if block.stream not in streams:
                streams[block.stream] = torch.cuda.Stream()
            try:
                with torch.cuda.stream(streams[block.stream]):
                    tensors[event] = torch.empty(block.nbytes, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                failed = at
        now = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
        if now != reserved:
            reserved = now
            changes.append((at, now))
        if failed is not None:
            break
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    recording = Recording(
        gpu=torch.cuda.get_device_name(),
        driver=subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        versions={"torch": torch.__version__, "cuda": torch.version.cuda},
        expandable_segments=expandable_segments,
        capacity_bytes=total if capacity_bytes is None else capacity_bytes,
        packed_timeline=timeline.pack(),
        reserved_changes=tuple(changes),
        memory_stats={name: value for name, value in torch.cuda.memory_stats().items() if value},
        failed_event=failed,
    )
    write_text(file, recording.model_dump_json(indent=1) + "\n")
    print(f"{file}: {len(timeline.events)} events, {recording.differences() or 'as replayed'}")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def main() -> int:
    """Record every trace with whole and with expandable segments; 1 where there is no GPU."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="also record the rehearsed training step of this model")
    parser.add_argument("--gpu", help="the card of `bigdit gpus` to rehearse it for", default="h200-sxm")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA GPU, whose allocator could be recorded")
        return 1
    traces = {f"made-up-{seed}": made_up_trace(seed) for seed in (1, 2)}
    if options.model:
        traces[options.model] = rehearsed_trace(options.model, options.gpu)
    for title, timeline in traces.items():
        peak = replay(timeline, 1024 * GIB).peak_reserved_bytes
        # torch checks a limit of its own before it maps pages, so a tight card is recorded with whole segments only.
        # Half a MiB beside a multiple of 2: the limit goes through a floating-point fraction of the card.
        tight = peak * 4 // 5 // (2 * MIB) * 2 * MIB + MIB // 2
        for suffix, capacity, expandable in (
            ("whole", None, False),
            ("expandable", None, True),
            ("tight", tight, False),
        ):
            file = FOLDER / f"{_slug(torch.cuda.get_device_name())}-{title}-{suffix}.json"
            arguments = (timeline, capacity, expandable, file)
            child = multiprocessing.get_context("spawn").Process(target=record, args=arguments)
            child.start()
            child.join()
            if child.exitcode:
                return child.exitcode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
