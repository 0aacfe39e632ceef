"""Checkpoints: each process's parts of the training state, by parameters' names; safetensors and JSON only.

1. Each engine says by `shards()` which elements of which parameters its masters hold. `engines/state.py` makes places
   of them: runs of masters, averages and optimizer state, by parameters' names.
2. `saver.py` copies them to the host and hands them to a thread. torch's distributed checkpoint plans who writes what
   and each process writes a file (`write.py`). The first one commits the folder and prunes old ones.
3. `folder.py` says which checkpoint a run resumes from, `resumable.py` whether it can. `verify.py` reads all bytes, and
   `restore.py` fills the places of whatever engine there is now. `export.py` makes diffusers' format.
4. The next start does what a killed run left: it removes temporary names and makes missing exports.
"""

from bigdit.checkpoint.export import PostHoc, export
from bigdit.checkpoint.folder import Checkpoint, find_checkpoint, latest
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.pipeline import pipeline_of
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
