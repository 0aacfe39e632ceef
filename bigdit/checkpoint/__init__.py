"""Checkpoints: each process's slices of the training state, by parameters' names; safetensors and JSON only.

1. Each engine's `shards()` says which elements of which parameters its masters hold. From these `engines/state.py`
   makes slices of masters, EMA and optimizer state, by parameters' names.
2. `saver.py` copies them to CPU memory, and a thread writes them. torch's distributed checkpoint plans which process
   writes what, and each process writes one file. The main process commits the folder and deletes old ones.
3. `folder.py` finds the checkpoint that a run resumes from, and verifies its files. `restore.py` checks whether the run
   can resume, and fills the slices of any engine. `export.py` writes diffusers' format.
4. After a killed run, the next start removes temporary files and writes missing exports.
"""

from bigdit.checkpoint.export import PostHoc, export
from bigdit.checkpoint.folder import Checkpoint, Peers, find_checkpoint, latest, verify
from bigdit.checkpoint.pipeline import pipeline_of
from bigdit.checkpoint.restore import (
    changed_since,
    check_objective,
    check_resumable,
    check_start,
    load_adapters,
    load_model,
    load_weights,
    restore,
)
from bigdit.checkpoint.saver import Keeping, Saver, remove_unfinished
