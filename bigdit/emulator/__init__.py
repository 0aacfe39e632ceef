"""The emulated card: the CUDA build of PyTorch over stub libraries, on a GPU that is not there.

`build` compiles the libraries (C in `c/`), `launch` is the environment that finds them, `hook` and `inside` are what
runs within an emulated process. Torch's own code is not here, and what a script did there is told by `report`.
"""

from bigdit.emulator.launch import emulated_environment, on_emulated_card, shared_state

__all__ = ["emulated_environment", "on_emulated_card", "shared_state"]
