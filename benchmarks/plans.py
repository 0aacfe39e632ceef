"""Plans of forty requests, beside the answers before: writes benchmarks/plans.md.

    python benchmarks/plans.py [PART OF A QUESTION]

plans.json has the answers before, by the search that also had a fake device, and why others are better. The exit status
is 1 where a verdict or a strategy differs. Plans are cached, so that the command continues where it was. With part of a
request nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.files import write_text
from bigdit.search.answer import make_plan
from bigdit.search.plan import Plan
from bigdit.search.resolve import resolve_request
from bigdit.units import gib

PAGE = Path(__file__).with_suffix(".md")
BEFORE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
REQUESTS = [
    *((model, gpu, 1) for model in ("sana-600m-1024", "sana-1600m-1024") for gpu in ("rtx-4090", "a40", "h100-sxm")),
    *(
        (model, "a40", 1)
        for model in ("pixart-sigma-xl-2-1024", "pixart-alpha-xl-2-512", "dit-xl-2", "hunyuandit-v1.2")
    ),
    *((model, "a100-80g-sxm", 1) for model in ("sd3-medium", "sd3.5-medium", "wan2.1-t2v-1.3b", "cogvideox-2b")),
    *((model, "h100-sxm", 1) for model in ("sd3.5-medium", "ltx-video-0.9", "lumina-image-2.0", "sana-video-2b-480p")),
    *((model, "rtx-4090", 1) for model in ("dit-b-4-paper", "dit-xl-2-paper", "pixart-sigma-xl-2-1024", "sd3-medium")),
    *((model, "rtx-3060-12g", 1) for model in ("dit-l-2", "pixart-alpha-xl-2-256", "sana-600m-512")),
    *((model, "a40", 8) for model in ("sana-600m-1024", "sana-1600m-1024", "pixart-sigma-xl-2-1024", "sd3.5-medium")),
    *((model, "h100-sxm", 8) for model in ("sana-1600m-1024", "sd3.5-large", "flux.1-dev", "wan2.1-t2v-1.3b")),
    *((model, "v100-32g-sxm2", 8) for model in ("dit-xl-2", "pixart-sigma-xl-2-512", "sana-600m-512")),
    *((model, "a100-80g-sxm", 16) for model in ("sana-1600m-1024", "cogvideox-5b", "qwen-image", "wan2.1-t2v-14b")),
]
"""Model, GPU, and number of GPUs."""

HEAD = """# Plans of forty requests

Made by `python benchmarks/plans.py`. *Reserved* is what torch reserves with the recommended strategy. *None* and *all*
are the largest micro-batches with no block and with all blocks recomputed: these ran, and one more did not fit.
*Before* is the answer of the search that also had a fake device. *s* is what the plan took, with an empty cache, on two
cores, beside other work."""


@dataclass(frozen=True)
class Line:
    """One request's plan, and its earlier answer."""

    asked: str
    plan: Plan

    @property
    def said(self) -> str:
        return f"{self.plan.verdict}: {self.plan.chosen.title}"

    @property
    def same(self) -> bool:
        """Whether verdict and strategy are as before."""
        return self.said == str(BEFORE[self.asked]["said"])

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest micro-batches of the planned size. If there are none, the machine lacks memory."""
        found = self.plan.buckets[0] if self.plan.buckets else None
        return {"none": None if found is None else found.none, "all": None if found is None else found.full}

    def cells(self) -> list[str]:
        before, reserved = BEFORE[self.asked], gib(self.plan.chosen.peak_reserved_bytes)
        pairs = [(self.said, before["said"]), (reserved, before["reserved"])]
        pairs += [(str(found), str(before[name])) for name, found in self.limits.items()]
        cells = [part for now, then in pairs for part in (now, "the same" if now == then else then)]
        return [self.asked, *cells, f"{self.plan.seconds:.0f}"]


def page(lines: Sequence[Line]) -> str:
    """The page of all answers so far."""
    names = ["plan", "reserved", "none", "all"]
    heads = ["request", *(part for name in names for part in (name, "before")), "s"]
    rows = [heads, ["---"] * len(heads), *(line.cells() for line in lines)]
    limits = [(found, BEFORE[line.asked][name]) for line in lines for name, found in line.limits.items()]
    return "\n".join(
        [
            HEAD,
            "",
            f"- {len(lines)} of {len(REQUESTS)} requests are answered. In {sum(line.same for line in lines)} of them "
            "verdict and strategy are those before.",
            f"- Of {len(limits)} largest micro-batches {sum(now == then for now, then in limits)} are those before.",
            f"- Torch {cuda_build(cuda_python())}.",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            "Other answers than before, and why:",
            "",
            *(f"- {line.asked}: {BEFORE[line.asked].get('why', 'not known')}." for line in lines if not line.same),
            "",
        ]
    )


def main(wanted: str) -> int:
    """Print a line a request. Returns 1 if an answer differs."""
    lines = []
    for model, gpu, gpus in REQUESTS:
        if wanted in f"{model} {gpu} {gpus}":
            plan = make_plan(resolve_request(model, gpu, gpus=gpus, buckets="none"))
            lines.append(Line(f"{model}, {gpus} × {gpu}", plan))
            print(" | ".join(lines[-1].cells()), flush=True)
            if not wanted:
                write_text(PAGE, page(lines))
    return int(not all(line.same for line in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="PART OF A QUESTION")
    sys.exit(main(" ".join(parser.parse_args().wanted)))
