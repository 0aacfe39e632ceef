"""A run as the user writes it: YAML into strict values, checked together before anything starts.

What needs torch, a store or a checkpoint to be checked is checked where those are opened.
"""

from bigdit.config.check import check
from bigdit.config.run import RunConfig
from bigdit.config.stages import Stage, load_run, load_stages

__all__ = ["RunConfig", "Stage", "check", "load_run", "load_stages"]
