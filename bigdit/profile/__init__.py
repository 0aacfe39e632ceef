"""Two training steps on an emulated GPU, in processes of their own: the memory that they need, and whether they fit.

1. `attempt.py` turns a model, a GPU and a Strategy into a request. `gpus.py` looks into the cache, else it starts
   `python -m bigdit.profile` on an emulated GPU. Nothing there imports torch.
2. That process (`__main__.py`) imports the libraries once. A fork of it builds each model once. Each job has a
   fork of that one (`pool.py`, both ends). A real GPU would not survive a fork.
3. `steps.py` hands the model to `engines.create` and calls `train_step`, for emulated and real GPUs alike.
4. `run_attempt.py` takes two steps within so many bytes. It reports torch's own counters by phase, bytes of CPU
   tensors (`emulator/c/host.c` counts them) and launches. A counted attempt also sums up the operators of its second
   step. Weights are address space without pages, and large CPU tensors are not computed (`unwritten.py`).
5. Values of small tensors cost two thirds of the time. An attempt goes without them first. If the forward pass
   read nothing on the CPU, no byte can depend on a value. Else it runs with them, as all do that differ only in sizes.
6. Of several processes only the first one runs, in a group that needs no peers.
7. A profile takes the two steps under `record`. The allocator's history has each block, `watch.py` says what it
   is, and the categories of a phase sum to torch's own peak.
"""
