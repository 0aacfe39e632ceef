"""The contracts between the layers: what is trained (ModelSpec), on what (BatchShape), how (Strategy).

Values alone: nothing here runs a step or knows a run's files.
"""

from bigdit.spec.strategy import LEAST_SWAPPED, Contradictory, EngineName, Precision, StepSize, Strategy, swap_misfit
from bigdit.spec.trained import (
    BITSANDBYTES,
    FACTORED,
    PROFILES,
    TORCHAO,
    EmaSpec,
    LoraBase,
    LoraSpec,
    OptimizerName,
    OptimizerSpec,
    Widths,
)
from bigdit.spec.values import BatchShape, ModelSpec, Strict

__all__ = [
    "BITSANDBYTES",
    "FACTORED",
    "LEAST_SWAPPED",
    "PROFILES",
    "TORCHAO",
    "BatchShape",
    "Contradictory",
    "EmaSpec",
    "EngineName",
    "LoraBase",
    "LoraSpec",
    "ModelSpec",
    "OptimizerName",
    "OptimizerSpec",
    "Precision",
    "StepSize",
    "Strategy",
    "Strict",
    "Widths",
    "swap_misfit",
]
