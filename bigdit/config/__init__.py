"""A run's YAML: read into strict values, and checked before anything starts.

What needs torch, a store or a checkpoint is checked where those are opened.
"""

from bigdit.config.check import check
from bigdit.config.run import RunConfig
from bigdit.config.stages import Stage, load_run, load_stages

__all__ = ["RunConfig", "Stage", "check", "load_run", "load_stages"]
