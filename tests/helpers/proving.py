"""The record of N real processes beside the rehearsal of the first of them, for many configurations at once.

Run as a script, it imports what they need, and forks: the real processes by their number, over gloo on the CPU, and
one that rehearses. An import of torch and DeepSpeed takes longer than most configurations.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from commands import HELPERS, run_ranks

from bigdit.memory import Timeline
from bigdit.rehearse import StepRequest, RehearsedSize


def prove(folder: Path, requests: Sequence[StepRequest], timeout: float) -> list[tuple[Timeline, RehearsedSize]]:
    """What the first process recorded, and its rehearsal, for each request; `strategy.world_size` processes run."""
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps([request.model_dump(mode="json") for request in requests]))
    done = run_ranks(1, __file__, asked, answered, PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu", timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        (Timeline.unpack(record), RehearsedSize.model_validate(answer))
        for record, answer in json.loads(answered.read_text())
    ]


def main(asked: Path, answered: Path) -> None:
    requests = [StepRequest.model_validate(value) for value in json.loads(asked.read_text())]
    _import(requests)
    gc.disable()  # so that the recordings' many collections pass over all that was recorded before
    gc.freeze()  # and over all that was imported
    rehearsed = asked.with_name("rehearsed.json")
    sizes = sorted({request.strategy.world_size for request in requests})
    launches = {size: [request for request in requests if request.strategy.world_size == size] for size in sizes}
    children = {_fork(_rehearse, requests, rehearsed)}
    for size, launched in launches.items():
        store = asked.with_name(f"store{size}")
        ranks = {_fork(_record, launched, rank, size, store, _real(asked, size)) for rank in range(size)}
        children = _wait(children | ranks, until=ranks)
    _wait(children, until=children)
    records = {size: iter(json.loads(_real(asked, size).read_text())) for size in sizes}
    answers = json.loads(rehearsed.read_text())
    pairs = [
        (next(records[request.strategy.world_size]), answer) for request, answer in zip(requests, answers, strict=True)
    ]
    answered.write_text(json.dumps(pairs))


def _real(asked: Path, size: int) -> Path:
    return asked.with_name(f"real{size}.json")


def _import(requests: Sequence[StepRequest]) -> None:
    import torch

    from bigdit import models
    from bigdit.engines import scaling

    torch.set_num_threads(1)
    for request in requests:
        models.build(request.model, device="meta", dtype=torch.float32)  # diffusers imports as it is asked
    # A rehearsal's gradients never overflow, and in fp16 these do not either: a step that is passed over would leave
    # no optimizer state.
    scaling.INITIAL_SCALE = 1.0
    if any(request.strategy.engine == "deepspeed" for request in requests):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        # DeepSpeed asks for a processor that is made for fp16; others compute it too.
        CPU_Accelerator.is_fp16_supported = lambda self: True


def _fork(function: Callable[..., None], *args: object) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*args)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)  # with the fake device registered, an interpreter does not shut down cleanly
    return child


def _wait(children: set[int], until: Iterable[int]) -> set[int]:
    """Until those have ended; the others. One that fails takes all with it: its peers would wait for it."""
    waited = set(until)
    while waited:
        child, status = os.wait()
        children.discard(child)
        waited.discard(child)
        if status:
            for other in children:
                os.kill(other, 9)
            raise SystemExit(f"process {child} ended with status {status}")
    return children


def _rehearse(requests: Sequence[StepRequest], answered: Path) -> None:
    from bigdit.rehearse.worker import rehearse_size

    answers = [rehearse_size(request, request.micro_batch_sizes[0]).model_dump(mode="json") for request in requests]
    answered.write_text(json.dumps(answers))


def _record(requests: Sequence[StepRequest], rank: int, size: int, store: Path, answered: Path) -> None:
    import torch
    import torch.distributed as dist

    from bigdit.dist import world_from_env
    from bigdit.rehearse.drive import drive
    from bigdit.profile.steps import Witness, prepare, two_steps

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    _give_gloo_time()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    answers, cpu = [], torch.device("cpu")
    for request in requests:
        if rank == 0:
            asked = (request.model, request.batch, request.strategy, request.objective, cpu)
            with _unhurried_waits(request.strategy.engine):
                timeline, _ = drive(*asked, world_from_env())
            answers.append(timeline.pack())
        else:  # its peers take the same steps, and nobody asks for their records
            workload = prepare(request.model, request.batch, request.strategy, None)
            two_steps(workload, request.objective, cpu, world_from_env(), Witness())
        if request.strategy.engine == "deepspeed":
            from bigdit.engines.deepspeed import forget

            forget()
    if rank == 0:
        answered.write_text(json.dumps(answers))
    dist.destroy_process_group()


# gloo's own thread lets go of a collective's tensors a moment after the collective ended, and waits for the
# interpreter's lock to do it: it is given that moment, for without it the record has the few bytes of an overflow flag,
# or a gathered unit, now sooner, now later. Of tensors that are given here it is known when they are let go of, which
# on a busy machine takes longer; of gloo's own copies it is not.
_MOMENT_S = 0.002
_LONGEST_S = 1.0
_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.13's names
)


def _give_gloo_time() -> None:
    import torch.distributed as dist

    for name in filter(lambda name: hasattr(dist, name), _COLLECTIVES):
        setattr(dist, name, _unhurried(getattr(dist, name)))


def _unhurried(collective: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        before = _uses(args)
        work = collective(*args, **kwargs)
        time.sleep(_MOMENT_S)
        until = time.monotonic() + _LONGEST_S
        while work is None and _uses(args) != before and time.monotonic() < until:
            time.sleep(_MOMENT_S)
        return work

    return call


def _uses(args: Sequence[object]) -> list[int]:
    """How often each tensor's storage is held."""
    import torch

    held = [each.untyped_storage() for each in args if isinstance(each, torch.Tensor)]
    return [torch._C._storage_Use_Count(each._cdata) for each in held]


def _unhurried_waits(engine: str) -> AbstractContextManager[object]:
    """The same for what DTensor waits for."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Unhurried(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops._c10d_functional.wait_tensor.default:
                return _unhurried(func)(*args)
            return func(*args, **(kwargs or {}))

    return Unhurried() if engine == "fsdp2" else nullcontext()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
