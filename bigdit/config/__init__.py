"""A run's YAML: read into strict values, and checked before anything starts.

Checks that need torch, a cache or a checkpoint are where those are opened.
"""

from bigdit.config.check import check
from bigdit.config.load import Stage, load_run, load_stages
from bigdit.config.run import RunConfig

__all__ = ["RunConfig", "Stage", "check", "load_run", "load_stages"]
