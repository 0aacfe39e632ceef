"""The average of a width that was not kept, made after the run of those that were (Karras et al., arXiv:2312.02696)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bigdit.checkpoint.folder import Checkpoint, Saved
from bigdit.checkpoint.restore import load_tensors, trained
from bigdit.checkpoint.snapshot import snapshots_of
from bigdit.checkpoint.verify import verify
from bigdit.engines.ema import exponent
from bigdit.engines.state import average_kind
from bigdit.errors import UserError
from bigdit.spec import EmaSpec
from bigdit.units import MIB

MOST_ERROR = 0.05
"""Of the profile that is made, as a share of the length of the wanted one."""
_AT_ONCE = 64 * MIB // 8
"""Elements that are summed up together; a file's header is read once for them."""


class PostHoc:
    """The average of `width` at the step of a checkpoint, of its own averages and those of its run's snapshots.

    `error`: of its profile, as a share of the wanted one's length; `said` tells of it. All files are verified.
    Raises UserError where there are no snapshots, or the width is too far from those that were kept.
    """

    def __init__(self, checkpoint: Checkpoint, width: float) -> None:
        ema = EmaSpec.model_validate(checkpoint.state["strategy"].get("ema") or {})
        if not 0 < width < 0.288:
            raise UserError(f"--ema-width is {width:g}, and a number above 0 and below 0.288 was expected")
        if not checkpoint.has_average or ema.widths is None:
            has = f"an average with train.{ema.profile}" if checkpoint.has_average else "no moving average"
            raise UserError(f"--ema-width: {checkpoint.folder} holds {has}; train with strategy.ema.widths")
        # By how many steps they have taken in: of two that are alike one is enough.
        self._kept: list[Saved] = list({each.state["updates"]: each for each in _kept(checkpoint)}.values())
        if len(self._kept) < 2:
            raise UserError(
                f"--ema-width: {checkpoint.folder} has no snapshots of averages before it; train with "
                "train.snapshot_every"
            )
        self._count = ema.count
        profiles = [(each.state["updates"], own) for each in self._kept for own in ema.widths]
        found, self.error = coefficients(profiles, (checkpoint.state["updates"], width))
        self._shares = found.reshape(len(self._kept), ema.count).tolist()
        self.said = f"the average of width {width:g} from {len(profiles)} others: its profile to {self.error:.1%}"
        if self.error > MOST_ERROR:
            raise UserError(
                f"--ema-width: {self.said}, and {MOST_ERROR:.0%} is the most; widths near {ema.profile} are closer, "
                "and so are all with a smaller train.snapshot_every"
            )
        for each in self._kept:
            verify(each)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill parameters by name, summed up in fp64; some at a time, however many there are."""
        for names in _groups(tensors):
            sums = {name: torch.zeros(tensors[name].shape, dtype=torch.float64) for name in names}
            for each, shares in zip(self._kept, self._shares, strict=True):
                kinds = [average_kind(i) for i in range(self._count)]
                read = {f"{kind}.{name}": torch.empty(tensors[name].shape) for kind in kinds for name in names}
                load_tensors(each, read)
                for kind, share in zip(kinds, shares, strict=True):
                    for name in names:
                        sums[name].add_(read[f"{kind}.{name}"], alpha=share)
            for name in names:
                tensors[name].copy_(sums[name])

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Fill the parameters that are trained, of a model with adapters theirs alone, rounded to their dtypes."""
        self.fill(trained(model))


def _kept(checkpoint: Checkpoint) -> Iterator[Saved]:
    """What averages can be made of: the checkpoint is a snapshot too."""
    for each in (*snapshots_of(checkpoint), checkpoint):
        if each.state["updates"]:  # none where all steps were skipped
            yield each


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Their names, as many at a time as are small enough together."""
    group: list[str] = []
    for name, tensor in tensors.items():
        if group and tensor.numel() + sum(tensors[each].numel() for each in group) > _AT_ONCE:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


Array = npt.NDArray[np.float64]
_LEAST = 1e-12
"""Of the largest singular value: what is below it of snapshots that lie close is rounding, of sums of 16 digits."""


def coefficients(kept: Sequence[tuple[int, float]], wanted: tuple[int, float]) -> tuple[Array, float]:
    """(how much of each average makes the wanted one, the error of its profile as a share of its own length).

    All are (steps taken in, width). The coefficients add up to one, as weights that stand still must stay.
    """
    steps, widths = np.array(kept, dtype=np.float64).T
    exponents = np.array([exponent(width) for width in widths])
    end, last = float(wanted[0]), exponent(wanted[1])
    among = _product(steps[:, None], exponents[:, None], steps, exponents)
    beside, own = _product(steps, exponents, end, last), float(_product(end, last, end, last))
    lengths = np.sqrt(np.diag(among))  # by which all are divided: the profiles of early steps are high
    found = np.linalg.lstsq(among / np.outer(lengths, lengths), beside / lengths, rcond=_LEAST)[0] / lengths
    found = found / found.sum()
    return found, float(np.sqrt(max(found @ among @ found - 2 * found @ beside + own, 0.0) / own))


def _product(steps: Any, exponents: Any, others: Any, theirs: Any) -> Array:
    """The integral of the product of two profiles, over the steps that both have (ibid., appendix C).

    By logarithms: t^γ of a narrow one overflows.
    """
    shared = np.log(np.minimum(steps, others))
    grown = (exponents + theirs + 1) * shared - (exponents + 1) * np.log(steps) - (theirs + 1) * np.log(others)
    product: Array = (exponents + 1) * (theirs + 1) / (exponents + theirs + 1) * np.exp(grown)
    return product
