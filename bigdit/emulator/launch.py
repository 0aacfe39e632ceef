"""The environment of a process with emulated GPUs, and of all its child processes.

The stub libraries read a GPU of the catalogue as one line of settings.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bigdit.catalog import Gpu
from bigdit.catalog.gpus import capability
from bigdit.emulator import build
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context, nccl_buffers
from bigdit.units import KIB, MIB

GPUS_MOST = 16
"""As in gpu.h."""

VALUES_BYTES = 64 * KIB
"""Tensors up to this size have values. Larger ones are neither written nor copied, except for masks
(inside/known.py)."""

_L2_MIB = 40
"""The L2 cache of GPUs for which the catalogue has none. No known allocation depends on it."""


def settings(gpu: Gpu, gpus: int, state: str | None = None, *, values: bool = True) -> str:
    """BIGDIT_EMULATED_GPU for `gpus` GPUs of this kind in one machine.

    `state`: the file that their processes share; None if each process has the GPUs alone. A process's context has its
    largest size, and so have NCCL's buffers with several GPUs. Without `values` no tensor has values. Raises UserError
    for too many GPUs.
    """
    if not 1 <= gpus <= GPUS_MOST:
        raise UserError(f"{gpus} GPUs were requested; an emulated machine has 1 to {GPUS_MOST}")
    has = capability(gpu.compute_capability)
    major, minor = gpu.compute_capability
    figures = {
        "major": major,
        "minor": minor,
        "multiprocessors": gpu.multiprocessors,
        "threads": has.threads,
        "blocks": has.blocks,
        "shared": has.shared_bytes,
        "shared_optin": has.shared_optin_bytes,
        "l2": int((gpu.l2_mib or _L2_MIB) * MIB),
        "total": gpu.total_bytes,
        "usable": gpu.driver_bytes,
        "context": cuda_context(gpu).high_bytes,
        "nccl": nccl_buffers(gpu, max(gpus, 2)).high_bytes,
        "values": VALUES_BYTES if values else 0,
        "count": gpus,
    }
    shared = {} if state is None else {"state": state}
    return " ".join(f"{key}={value}" for key, value in {**figures, **shared, "name": gpu.title}.items())


HOOK = Path(__file__).parent / "hook"
"""A folder with a sitecustomize.py, which Python runs at its start."""

_STATE_BYTES = 1 << 20
"""Larger than the libraries' table of processes (gpu.c)."""


def emulated_environment(
    gpu: Gpu, gpus: int = 1, state: str | None = None, *, peers: bool = True, values: bool = True
) -> dict[str, str]:
    """Variables for a child process, which override this process's own.

    `state`: the file of `shared_state`, if several processes share GPUs. Without `peers`, a process group's other
    ranks do not exist. Without `values`, small tensors are not computed either, and all reads of the GPU are zero: for
    single processes whose memory depends on shapes only. CPU tensors of 32 MiB and more share pages and have no
    values. In saved files, large tensors after the first MiB are holes.

    Raises UserError for too many GPUs, and if there is no C compiler.
    """
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "BIGDIT_EMULATED_GPU": settings(gpu, gpus, state, values=values),
        "BIGDIT_EMULATED_CACHE": str(build.cache_folder()),
        "BIGDIT_EMULATED_RECIPE": build.recipe(),
        "BIGDIT_EMULATED_BUILDER": sys.executable,
        "BIGDIT_EMULATED_HOME": str(Path(__file__).parents[2]),
        "BIGDIT_EMULATED_PEERS": "1" if peers else "0",
        "BIGDIT_EMULATED_VALUES": "1" if values else "0",
        "DS_ACCELERATOR": "cuda",  # this process may have another one
        # Else torch puts kernels of Triton between the dispatcher and its own, which computing values would call again.
        "TORCH_DISABLE_NATIVE_JIT": "1",
        **compile_caches(),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def compile_caches() -> dict[str, str]:
    """The caches of torch.compile and Triton, unless the user names some.

    They have candidates of autotuners that nothing timed, which must not reach a real GPU of the same name.
    """
    compiled = build.cache_folder() / "compiled"
    with suppress(OSError):  # torch makes it with its first import, compiled or not
        (compiled / "inductor").mkdir(parents=True, exist_ok=True)
    if not os.access(compiled / "inductor", os.W_OK):  # as bigdit's own cache, it may be read-only
        compiled = Path(tempfile.gettempdir(), f"bigdit-compiled-{os.getuid()}")
    own = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"), "TRITON_CACHE_DIR": str(compiled / "triton")}
    return {name: os.environ.get(name) or folder for name, folder in own.items()}


def on_emulated_gpu() -> bool:
    """Whether this process's CUDA devices are emulated."""
    return "BIGDIT_EMULATED_GPU" in os.environ


@contextmanager
def shared_state() -> Iterator[str]:
    """The path of an anonymous file in which the processes of one emulation count their bytes.

    It lies in this process's memory, so nothing is left when this process ends.
    """
    descriptor = os.memfd_create("bigdit-gpus", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _STATE_BYTES)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
