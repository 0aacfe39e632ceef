"""A run as the user writes it: YAML into strict values, checked together before anything starts."""

from bigdit.config.check import check, strategy_of
from bigdit.config.load import load_run
from bigdit.config.run import RunConfig

__all__ = ["RunConfig", "check", "load_run", "strategy_of"]
