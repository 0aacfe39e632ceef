"""The numbers that a user may write: no truth value is one, none is infinite, and integers are of 64 bits at most."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from bigdit.units import LARGEST

MOST_PROCESSES = 1024
"""Processes, or threads, of one machine. It has a few hundred cores, and 16 cards at most."""

LARGEST_SIDE = 65535
"""Pixels of one side: a JPEG has no more (ITU-T T.81, B.2.2)."""


def no_truth_value(value: Any) -> Any:
    """The value, unless it is true or false, which python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number was expected")
    return value


_Whole = Annotated[int, Field(strict=True, le=LARGEST)]
Natural = Annotated[_Whole, Field(ge=0)]
Count = Annotated[_Whole, Field(ge=1)]
Processes = Annotated[_Whole, Field(ge=1, le=MOST_PROCESSES)]
Side = Annotated[_Whole, Field(ge=1, le=LARGEST_SIDE)]

Number = Annotated[float, BeforeValidator(no_truth_value), Field(allow_inf_nan=False)]
"""A text such as `1e-4` stands for one too: YAML 1.1 reads it as a text."""
Positive = Annotated[Number, Field(gt=0.0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]

Switch = Annotated[bool, Field(strict=True)]
