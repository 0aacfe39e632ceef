"""Types of numbers that users write: no truth values, finite, integers of at most 64 bits."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from bigdit.units import LARGEST, LARGEST_SIDE

MOST_PROCESSES = 1024
"""The most processes or threads of one machine, which has a few hundred cores and at most 16 GPUs."""


def no_truth_value(value: Any) -> Any:
    """The value, unless it is true or false, which Python treats as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number was expected")
    return value


_Whole = Annotated[int, Field(strict=True, le=LARGEST)]
Natural = Annotated[_Whole, Field(ge=0)]
Count = Annotated[_Whole, Field(ge=1)]
Processes = Annotated[_Whole, Field(ge=1, le=MOST_PROCESSES)]
Side = Annotated[_Whole, Field(ge=1, le=LARGEST_SIDE)]

Number = Annotated[float, BeforeValidator(no_truth_value), Field(allow_inf_nan=False)]
"""Also text such as `1e-4`, which YAML 1.1 reads as text."""
Positive = Annotated[Number, Field(gt=0.0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]

Switch = Annotated[bool, Field(strict=True)]
