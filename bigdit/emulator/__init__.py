"""The emulated GPU: the CUDA build of PyTorch over stub libraries. Torch's own code is not changed.

1. `launch.py` is the environment of an emulated process: settings of cards, and a folder on PYTHONPATH. Every python
   runs its `hook/sitecustomize.py` first, which loads `inside/`. `inside` imports nothing of bigdit.
2. Before torch is imported, `inside/libraries.py` loads the stub libraries. The dynamic linker prefers a loaded
   library, so NVIDIA's own are never looked for. `build.py` compiles the stubs at first use: it reads which
   functions torch wants, `c/` has those that do something, and it says how the others answer.
3. `c/card.c` counts bytes and hands out addresses without memory behind them. `c/runtime.c` counts launches and runs
   none. `c/nccl.c` exchanges small payloads. `c/host.c` lets large host tensors share pages.
4. `inside/values.py` wraps the dispatcher's CUDA kernels: results of at most 64 KiB are computed by the CPU. No
   dispatch mode is active, since one would change what autograd allocates. `known.py` knows which values were computed,
   and reports a read of one that was not.
5. `run.py` runs a command so, with `smi.py` as its `nvidia-smi`. The observers of `inside/` write an account a process,
   `emulation.py` reads it and says what it means. `fake_weights.py` makes a hub cache whose weights are holes in files.
"""

from bigdit.emulator.launch import emulated_environment, on_emulated_card, shared_state

__all__ = ["emulated_environment", "on_emulated_card", "shared_state"]
