"""Rehearse the training step on a device that is not there, in a process of its own."""

from bigdit.rehearse.client import RehearsalError, rehearse
from bigdit.rehearse.request import Rehearsal, RehearsalRequest, RehearsedSize

__all__ = ["Rehearsal", "RehearsalError", "RehearsalRequest", "RehearsedSize", "rehearse"]
