"""Checkpoints: diffusers weights, and each process's share of the training state; safetensors and JSON only."""

from bigdit.checkpoint.folder import Checkpoint, latest
from bigdit.checkpoint.save import restore, save

__all__ = ["Checkpoint", "latest", "restore", "save"]
