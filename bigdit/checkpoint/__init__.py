"""Checkpoints: each process's parts of the training state, by parameters' names; safetensors and JSON only.

1. Each engine's `shards()` says which elements of which parameters its masters hold. `engines/state.py` makes places
   of them: runs of masters, EMA and optimizer state, by parameters' names.
2. `saver.py` copies them to CPU memory and hands them to a thread. torch's distributed checkpoint plans who writes
   what, and each process writes a file. The first process commits the folder and deletes old ones.
3. `folder.py` finds the checkpoint that a run resumes from, and reads all its bytes. `restore.py` checks whether the
   run can resume, and fills the places of its engine, whichever that is. `export.py` makes diffusers' format.
4. The next start cleans up after a killed run: it removes temporary names and makes missing exports.
"""

from bigdit.checkpoint.export import PostHoc, export
from bigdit.checkpoint.folder import Checkpoint, Peers, find_checkpoint, latest, verify
from bigdit.checkpoint.pipeline import pipeline_of
from bigdit.checkpoint.restore import (
    changed_since,
    check_objective,
    check_resumable,
    check_whole,
    load_adapters,
    load_model,
    load_weights,
    restore,
    written_here,
)
from bigdit.checkpoint.saver import Keeping, Saver, remove_unfinished

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
    "load_adapters",
    "load_model",
    "load_weights",
    "pipeline_of",
    "remove_unfinished",
    "restore",
    "verify",
    "written_here",
]
