"""Steps that were not taken, since their gradients were not finite: each is said, and too many in a row end the run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from bigdit import log
from bigdit.checkpoint import Peers
from bigdit.engines import Engine
from bigdit.errors import UserError
from bigdit.loader.stream import Micro
from bigdit.train.seen.samples import Samples, listed
from bigdit.train.step import StepResult
from bigdit.units import how_many

_FIX = "lower optimizer.lr, lengthen train.warmup_steps, or set train.gradient_clipping"
_MEND = "encode these samples again, where they are a VAE's with encoders.image.dtype fp32, or leave them out"


class SkippedSteps:
    """Counts them; all processes call it alike. `most`: how many may follow each other."""

    def __init__(self, engine: Engine, peers: Peers, samples: Samples, most: int) -> None:
        self._engine = engine
        self._peers = peers
        self._samples = samples
        self._most = most
        self._in_a_row = 0
        self.count = 0

    def add(self, step: int, lr: float, result: StepResult, micro_batches: Sequence[Micro]) -> None:
        """The result on these micro-batches of the step with which `step` are finished. Raises UserError where `most`
        in a row were skipped.

        In fp16 gradients overflow until the loss is scaled less: such a step is counted, and no more.
        """
        if result.taken:
            self._in_a_row = 0
            return
        self.count += 1
        found = self._peers.gather((float(result.loss), self._samples.not_finite(step, micro_batches)))
        loss = statistics.fmean(each for each, _ in found)
        if math.isfinite(loss) and self._engine.loss_scale > 1:
            return
        self._in_a_row += 1
        ends = self._in_a_row == self._most
        if not self._peers.world.is_main and not ends:
            return
        wrong = list(itertools.chain.from_iterable(names for _, names in found))
        norm = "" if result.grad_norm is None else f", its gradients' norm {float(result.grad_norm):.4g}"
        line = f"the loss of step {step} is {loss:.4g}{norm} at learning rate {lr:.2e}; " + (
            f"not finite is what the store has of {listed(wrong, len(wrong))}" if wrong else self._samples.of_step(step)
        )
        if ends:
            raise UserError(
                f"training skipped {how_many(self._most, 'step')} in a row (train.most_skipped_steps): {line}; "
                + (_MEND if wrong else _FIX)
            )
        log.notice(f"note: step {step} is skipped: {line}")

    def sum_up(self, steps: int, metrics: Path) -> None:
        """Say how many of the run's `steps` were skipped, where any were; `metrics` says which."""
        if self.count:
            log.notice(f"note: {self.count} of {how_many(steps, 'step')} skipped; {metrics} says which")
