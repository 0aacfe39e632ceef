"""Made-up receipts of runs."""

import datetime

from tiny_models import SANA, SHAPE

from bigdit.config.strategy_text import parse_strategy
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.receipt import Receipt

GIB = 1 << 30


def receipt_of(text="single", **fields):
    """A receipt of a tiny Sana on an A100, with the strategy `text`."""
    known = {
        "kind": "train",
        "written": datetime.date(2026, 1, 2),
        "model": SANA,
        "batch": SHAPE,
        "buckets": 1,
        "strategy": parse_strategy([text]),
        "objective": FlowMatchingSpec(),
        "device": "NVIDIA A100-SXM4-80GB",
        "compute_capability": (8, 0),
        "gpus_per_node": 8,
        "steps": 100,
        "seconds": 20.0,
        "seconds_per_step": 0.1,
        "samples_per_second": 10.0,
        "measured_peak_allocated_bytes": GIB,
        "measured_peak_reserved_bytes": 2 * GIB,
        "measured_with": "torch.cuda.max_memory_allocated",
    }
    return Receipt(**(known | fields))
