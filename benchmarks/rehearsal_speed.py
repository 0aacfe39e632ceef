"""How long rehearsals take, cold and from the cache on disk, with the host memory of the process that rehearses.

python benchmarks/rehearsal_speed.py [PART OF A NAME]
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

from bigdit.rehearse import rehearse

from bigdit import catalog
from bigdit.config.strategy import parse_strategy
from bigdit.profile.request import request_for
from bigdit.units import GIB, KIB, gib

SMALL_S, LARGE_S, WARM_S, RSS_BYTES = 15.0, 40.0, 0.2, 3 * GIB
"""Limits: of models of 1 to 2 B parameters, of 12 to 14 B, of the same question again, of host memory."""

SANA = (
    "single",
    "single,checkpointed_blocks=all,optimizer.name=adamw_8bit",
    "single,optimizer.name=came",
    "zero1,world_size=8",
    "zero2,world_size=8",
    "zero3,world_size=8",
    "zero3,world_size=4096",
    "zero2-offload,world_size=8",
    "zero3-offload-all,world_size=8",
    "fsdp2,world_size=8",
    "fsdp2,world_size=4096",
    "fsdp2,world_size=64,dp_replicate=8",
    "fsdp2-offload,world_size=8",
)
LARGE = ("zero3,world_size=8,checkpointed_blocks=all", "fsdp2,world_size=8,checkpointed_blocks=all")
CASES = [
    *(("sana-1600m-1024", strategy, SMALL_S) for strategy in SANA),
    *(("flux.1-dev", strategy, LARGE_S) for strategy in LARGE),
    *(("wan2.1-t2v-14b", strategy, LARGE_S) for strategy in LARGE),
]


def main(wanted: str) -> int:
    """One line a question; 1 where one took more than its limit."""
    print("| model | strategy | cold s | again ms | peak | most host memory so far |")
    print("| --- | --- | --- | --- | --- | --- |")
    slow = False
    for name, text, limit in CASES:
        if wanted not in f"{name} {text}":
            continue
        request = request_for(catalog.model(name), catalog.gpu("a100-80g-sxm"), parse_strategy([text]))
        began = time.perf_counter()
        found = rehearse(request).sizes[0]
        cold = time.perf_counter() - began
        began = time.perf_counter()
        rehearse(request)
        warm = time.perf_counter() - began
        rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIB
        slow = slow or cold > limit or warm > WARM_S or rss > RSS_BYTES
        peak = f"{gib(found.ledger.peak_allocated_bytes)} in {found.ledger.deciding.phase}"
        print(f"| {name} | `{text}` | {cold:.1f} | {warm * 1000:.1f} | {peak} | {gib(rss)} |", flush=True)
    return int(slow)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", default="", metavar="PART OF A NAME")
    part = parser.parse_args().wanted
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BIGDIT_CACHE"] = folder
        raise SystemExit(main(part))
