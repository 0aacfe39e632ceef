"""Ask for steps on an emulated card: a process of the CUDA build of torch answers. Nothing here imports torch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from bigdit.catalog import Gpu
from bigdit.checkout import ROOT, in_checkout, own_module
from bigdit.emulator import emulated_environment
from bigdit.errors import UserError
from bigdit.rehearse.card import cache as card_cache
from bigdit.rehearse.card.run import RAN_OUT, CardRun, RanOut
from bigdit.rehearse.lanes import Lanes, Started
from bigdit.rehearse.request import RehearsalRequest, RehearsedSize
from bigdit.spec import Strict


def cuda_python() -> Path:
    """The interpreter of an environment with the CUDA build of torch: BIGDIT_CUDA_PYTHON, or this one where it has it,
    or that of a checkout's `.venv-cuda`.

    Raises UserError where there is none.
    """
    chosen, own = os.environ.get("BIGDIT_CUDA_PYTHON"), Path(sys.executable)
    if not chosen and _has_cuda(own):
        return own
    python = Path(chosen or ROOT / ".venv-cuda" / "bin" / "python")
    if not python.exists():
        missing = f"{python} is no interpreter with" if chosen or in_checkout() else f"{own} is without"
        raise UserError(f"{missing} the CUDA build of torch; {_mends()}")
    return python


def _mends() -> str:
    """What sets up an interpreter with the CUDA build of torch."""
    if in_checkout():
        return "`make cuda` sets one up in .venv-cuda, and BIGDIT_CUDA_PYTHON names another"
    return (
        "`pip install --force-reinstall torch` with no index of CPU builds has it on Linux, and BIGDIT_CUDA_PYTHON "
        "names another interpreter that has it, and what bigdit needs"
    )


def _has_cuda(python: Path) -> bool:
    try:
        cuda_build(python)
    except UserError:
        return False
    return True


@functools.cache
def cuda_build(python: Path) -> str:
    """The version of the torch that `python` has, with the CUDA that it was built for, read without importing it."""
    script = (
        "import importlib.util as u, pathlib as p;"
        "print(p.Path(u.find_spec('torch').origin).with_name('version.py').read_text())"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for name, given, text in (line.partition("=") for line in done.stdout.splitlines()):
        if given and name.split(":")[0].strip() in ("__version__", "cuda"):
            found[name.split(":")[0].strip()] = text.strip().strip("'")
    if found.get("cuda", "None").endswith("None"):
        raise UserError(f"{python} has torch {found.get('__version__', '(none)')}, which is no CUDA build; {_mends()}")
    return f"{found['__version__']} CUDA {found['cuda']}"


class Card:
    """One emulated card, whose allocator is torch's default or has expandable segments. Each question is answered by a
    process of its own, whose libraries are imported already.

    It starts with the first question whose answer is not kept, and ends with the `with` block.
    """

    def __init__(self, gpu: Gpu, *, expandable_segments: bool = False) -> None:
        self.gpu = gpu
        self._build = build_with(expandable_segments)
        self._lanes = Lanes(worker(gpu, "bigdit.rehearse.card.runs", expandable_segments=expandable_segments))

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *error: object) -> None:
        self._lanes.end()

    def run(self, request: RehearsalRequest, timeout_s: float = 120.0) -> CardRun:
        """Two steps of `request` on the card, or what is kept of them.

        Raises RanOut where the card is too small, UserError where they take longer, and for what the user can mend;
        RehearsalError where the process dies.
        """
        kept = card_cache.find(self.gpu, request, self._build)
        if kept is None:
            kept = CardRun.model_validate_json(ask(self._lanes, 0, self.gpu, request.model.name, request, timeout_s))
            card_cache.keep(self.gpu, request, self._build, kept)
        return kept


class Profiler:
    """One emulated card, whose allocator has expandable segments. Steps are recorded there: what lies in memory, by
    category and phase, to the byte of torch's own counters.

    It starts with the first question and ends with the `with` block.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lanes = Lanes(worker(gpu, "bigdit.rehearse.card.profile", expandable_segments=True))

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._lanes.end()

    def run(self, request: RehearsalRequest, timeout_s: float = 300.0) -> RehearsedSize:
        """Two steps of the request's first micro-batch size. Raises what `Card.run` raises."""
        return RehearsedSize.model_validate_json(ask(self._lanes, 0, self.gpu, request.model.name, request, timeout_s))


def worker(gpu: Gpu, module: str, *, expandable_segments: bool) -> Started:
    """A process with an emulated card, which runs `python -m MODULE`, as Lanes start it."""

    def started() -> tuple[list[str], dict[str, str]]:
        environment = worker_environment(gpu, expandable_segments=expandable_segments)
        return [str(cuda_python()), "-W", "ignore", *own_module(module)], environment

    return started


def ask(lanes: Lanes, lane: int, gpu: Gpu, model: str, question: Strict, timeout_s: float) -> bytes:
    """The answer of one of the `lanes` to a question about the model of this name.

    Raises RanOut where the card is too small, UserError where it takes longer, and for what the user can mend;
    RehearsalError where the process dies.
    """
    try:
        return lanes.ask(lane, f"{model} on an emulated card", question, timeout_s)
    except TimeoutError:
        raise UserError(f"two steps of {model} on an emulated {gpu.name} took more than {timeout_s:g} s") from None
    except UserError as error:
        raise told(error) from None


def told(error: Exception) -> Exception:
    """The error that a worker ended with, as RanOut where it says that."""
    ran_out = isinstance(error, UserError) and error.problems[0].startswith(RAN_OUT)
    return RanOut(*error.problems) if isinstance(error, UserError) and ran_out else error


def build_with(expandable_segments: bool) -> str:
    """What decides an answer beside the question: the build of torch, and how its allocator is set."""
    return cuda_build(cuda_python()) + (", expandable segments" if expandable_segments else "")


def worker_environment(
    gpu: Gpu, ranks: int = 1, state: str | None = None, *, expandable_segments: bool = False
) -> dict[str, str]:
    """A card for each of the ranks that there are, no network, and no place in a launched group.

    One rank alone has no peers, whatever its strategy; `state` is the file that several share.
    """
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF"):
        own.pop(name, None)
    own["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable_segments}"
    card = emulated_environment(gpu, ranks, state, peers=ranks > 1)
    return own | card | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), card["PYTHONPATH"]))}
