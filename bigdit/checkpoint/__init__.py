"""Checkpoints: each process's runs of the training state, by parameters' names; safetensors and JSON only.

`Saver` writes them while training goes on, `latest` finds one, `verify` reads its bytes, `restore` puts it back under
any engine, `export` makes diffusers' format of it, and `PostHoc` averages
of other widths than were kept.
"""

from bigdit.checkpoint.export import export
from bigdit.checkpoint.find import find_checkpoint, latest
from bigdit.checkpoint.folder import Checkpoint
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.pipeline import pipeline_of
from bigdit.checkpoint.posthoc import PostHoc
from bigdit.checkpoint.restore import check_whole, load_model, load_weights, restore, written_here
from bigdit.checkpoint.resumable import changed_since, check_objective, check_resumable
from bigdit.checkpoint.saver import Keeping, Saver, remove_unfinished
from bigdit.checkpoint.verify import verify

__all__ = [
    "Checkpoint",
    "Keeping",
    "Peers",
    "PostHoc",
    "Saver",
    "changed_since",
    "check_objective",
    "check_resumable",
    "check_whole",
    "export",
    "find_checkpoint",
    "latest",
    "load_model",
    "load_weights",
    "pipeline_of",
    "remove_unfinished",
    "restore",
    "verify",
    "written_here",
]
