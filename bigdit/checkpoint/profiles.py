"""Which sum of averages is the average of another width: least squares between their profiles over the steps.

A profile is p(t) = (γ + 1) t^γ / T^(γ + 1) for 0 < t ≤ T, of an average that has taken T steps in.
Source: Karras et al., arXiv:2312.02696, §3.2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bigdit.engines.ema import exponent

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
