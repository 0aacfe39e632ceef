"""Rehearse the training step on a device that is not there, in a process of its own.

`kernels` and `scratch` are what CUDA's kernels give and take, `engines` what engines ask of the device, `card` the same
steps on an emulated card. Every patch of torch stays in those processes.
"""

from bigdit.rehearse.client import rehearse
from bigdit.rehearse.lanes import RehearsalError
from bigdit.rehearse.request import Rehearsal, RehearsalRequest, RehearsedSize

__all__ = ["Rehearsal", "RehearsalError", "RehearsalRequest", "RehearsedSize", "rehearse"]
