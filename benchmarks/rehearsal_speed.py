"""How long a rehearsal takes, cold and from the cache, and what it finds: Sana-1600M at 1024 pixels on one card.

python benchmarks/rehearsal_speed.py
"""

from __future__ import annotations

import os
import tempfile
import time

from bigdit import catalog
from bigdit.rehearse import RehearsalRequest, rehearse
from bigdit.spec import BatchShape, OptimizerSpec, Strategy
from bigdit.units import gib

LIMIT_S = 15.0
MICRO_BATCH_SIZES = (1, 2)


def main() -> int:
    """Print one line a question and the ledger of each answer; 1 where a cold one took longer than the limit."""
    model = catalog.model("sana-1600m-1024")
    shape = BatchShape(latents=(32, 32, 32), text=(300, 2304))
    slow = False
    for optimizer in ("adamw", "adamw_8bit"):
        for checkpointed in (0, "all"):
            strategy = Strategy(optimizer=OptimizerSpec(name=optimizer), checkpointed_blocks=checkpointed)
            request = RehearsalRequest(
                model=model.spec, batch=shape, strategy=strategy, micro_batch_sizes=MICRO_BATCH_SIZES
            )
            cold, answer = _timed(request)
            warm, _ = _timed(request)
            slow = slow or cold > LIMIT_S
            print(f"{optimizer}, checkpointed_blocks {checkpointed}: {cold:.1f} s cold, {warm * 1000:.1f} ms again")
            for size in answer.sizes:
                ledger = size.ledger
                parts = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in ledger.at_peak.items())
                peak = f"{gib(ledger.peak_allocated_bytes)} in {ledger.deciding.phase}"
                print(f"  micro_batch_size {size.micro_batch_size}: {peak}: {parts}")
                print("    " + ", ".join(f"{phase.phase} {gib(phase.peak_bytes)}" for phase in ledger.phases))
    return int(slow)


def _timed(request: RehearsalRequest):
    began = time.perf_counter()
    answer = rehearse(request)
    return time.perf_counter() - began, answer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BIGDIT_CACHE"] = folder
        raise SystemExit(main())
