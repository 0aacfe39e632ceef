"""The contracts between the layers: what is trained (ModelSpec), on what (BatchShape), how (Strategy).

Values alone: nothing here runs a step or knows a run's files.
"""

from bigdit.strategy.strategy import (
    LEAST_SWAPPED,
    MOST_GPUS,
    Contradictory,
    EngineName,
    Precision,
    StepSize,
    Strategy,
    swap_misfit,
)
from bigdit.strategy.trained import (
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
from bigdit.strategy.values import BatchShape, ModelSpec, Section, Strict

__all__ = [
    "BITSANDBYTES",
    "FACTORED",
    "LEAST_SWAPPED",
    "MOST_GPUS",
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
    "Section",
    "StepSize",
    "Strategy",
    "Strict",
    "Widths",
    "swap_misfit",
]
