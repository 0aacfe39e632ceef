"""A thousand attempts on one emulated card: each must find what the first one of its kind found, in one process.

python benchmarks/attempts.py [HOW MANY]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from bigdit import catalog
from bigdit.config.strategy import parse_strategy
from bigdit.profile.attempt import Asked, Attempt, Attempts
from bigdit.profile.request import request_for
from bigdit.units import GIB

MODELS = ("dit-s-2", "dit-b-4", "sana-600m-512")
STRATEGIES = ("single", "single,optimizer.name=adamw_8bit", "zero2,world_size=8", "fsdp2,world_size=8")


def main(count: int) -> int:
    """One line; 1 where an attempt found other bytes, or the process had to be started anew."""
    gpu = catalog.gpu("a40")
    requests = [
        request_for(catalog.model(model), gpu, parse_strategy(strategy.split(",")).with_micro_batch_size(2))
        for model, strategy in itertools.product(MODELS, STRATEGIES)
    ]
    first: dict[int, tuple[int, int]] = {}
    processes, other, began = set(), 0, time.perf_counter()
    with Attempts(gpu) as card:
        for at in range(count):
            request = requests[at % len(requests)]
            asked = Asked(request=request, capacity_bytes=40 * GIB)
            found = Attempt.model_validate_json(card.lanes.ask(0, request.model.name, asked, 120.0))
            peaks = found.peak_allocated_bytes, found.peak_reserved_bytes
            other += first.setdefault(at % len(requests), peaks) != peaks
            processes |= {*filter(None, card.lanes.forks)}
    seconds = time.perf_counter() - began
    print(
        f"{count} attempts of {len(requests)} kinds by {len(processes)} process(es) in {seconds:.0f} s: {other} differ"
    )
    return int(bool(other) or len(processes) > 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1000, metavar="HOW MANY")
    sys.exit(main(parser.parse_args().count))
