"""The emulated GPU: the CUDA build of PyTorch over stub libraries. Torch's own code is not changed.

1. `launch.py` makes the environment of an emulated process: settings of GPUs, and a folder on PYTHONPATH. Every python
   runs its `hook/sitecustomize.py` first, which loads `inside/`. `inside` imports nothing of bigdit.
2. Before torch is imported, `inside/libraries.py` loads the stub libraries. The dynamic linker prefers a loaded
   library, so NVIDIA's own are never looked for. `build.py` compiles the stubs at first use: it reads which
   functions torch needs; `c/` has those that do something; it generates the others.
3. `c/gpu.c` counts bytes and hands out addresses without memory behind them. `c/runtime.c` counts launches and runs
   none. `c/nccl.c` exchanges small payloads. `c/host.c` lets large host tensors share pages.
4. `inside/values.py` wraps the dispatcher's CUDA kernels: the CPU computes results of at most 64 KiB, and masks.
   `inside/known.py` knows which values were computed. A read of another one is reported. A dispatch mode would change
   what autograd allocates.
5. `run.py` runs a command, with `smi.py` as its `nvidia-smi`. Each process writes an account (`inside/account.py`), and
   `emulation.py` evaluates the accounts. `fake_weights.py` makes a hub cache whose weights are holes in files.
"""

from bigdit.emulator.launch import emulated_environment, on_emulated_gpu, shared_state
