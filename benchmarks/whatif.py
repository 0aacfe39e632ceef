"""Seconds from a change on a live page to its answer: as it runs on the emulated card, and as it is rehearsed.

python benchmarks/whatif.py [MODEL [GPU [HOW MANY]]]

`bigdit whatif` is started as people start it, with a cache of its own, and asked what its page asks: one change after
another of micro-batch and recomputed blocks, none of which ran before. The page waits 0.12 s more, for a next change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any


def main(model: str, gpu: str, count: int) -> int:
    """Two lines, of both kinds; the first question's answer, which waits for the libraries, is said beside them."""
    with tempfile.TemporaryDirectory() as cache:
        command = [Path(sys.executable).with_name("bigdit"), "whatif", "--model", model, "--gpu", gpu, "--no-browser"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"BIGDIT_CACHE": cache})
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            _measure(url, count)
        finally:
            server.terminate()
            server.wait()
    return 0


def _measure(url: str, count: int) -> None:
    with urllib.request.urlopen(url) as answer:
        found = re.search(r'id="whatif-data">(.*?)</script>', answer.read().decode(), re.DOTALL)
    assert found is not None
    given = json.loads(found[1])
    start = given["start"]
    way = next(each for each in given["settings"] if each["strategy"] == start["strategy"])
    sizes = itertools.cycle(way["sizes"][: 2 * start["micro-batch"]])
    changes = [(next(sizes), way["blocks"][-1 - at % len(way["blocks"])]) for at in range(count + 1)]
    for path in ("run", "rehearse"):
        taken = [_seconds(url + path, start, size, blocks) for size, blocks in changes]
        rest = sorted(taken[1:])
        low, high = os.getloadavg()[0], os.cpu_count()
        print(
            f"{path}: {statistics.median(rest):.2f} s, the median of {len(rest)} changes; {rest[0]:.2f} to "
            f"{rest[-1]:.2f} s; the first {taken[0]:.1f} s; load {low:.1f} on {high} cores",
            flush=True,
        )


def _seconds(url: str, start: dict[str, Any], size: int, blocks: int) -> float:
    body = {"strategy": start["strategy"], "card": start["card"], "micro_batch_size": size}
    request = urllib.request.Request(
        url,
        json.dumps(body | {"checkpointed_blocks": blocks}).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        said = json.loads(answer.read())
    if "verdict" not in said:
        raise SystemExit(f"no answer: {said}")
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="sana-1600m")
    parser.add_argument("gpu", nargs="?", default="a40")
    parser.add_argument("count", type=int, nargs="?", default=20, metavar="HOW MANY")
    sys.exit(main(**vars(parser.parse_args())))
