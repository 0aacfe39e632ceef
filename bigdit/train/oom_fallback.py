"""When a step runs out of GPU memory, all processes save, restart with less memory, and repeat the step.

The smaller strategy has the same samples per step. A file keeps it for all later starts. The process that runs out of
memory tells the others through the run's store. They listen in a thread, because their main thread may wait in a
collective. No weight has changed by then: every engine asks all processes before it steps.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from pydantic import ValidationError

from bigdit import log, shortage
from bigdit.cache import read_checksummed, write_checksummed
from bigdit.checkpoint import Peers
from bigdit.config.run import RunConfig
from bigdit.errors import EXIT_USER, UserError
from bigdit.receipt import OutOfMemory
from bigdit.strategy import StepSize, Strategy, Strict
from bigdit.train.measure import MemoryMeter
from bigdit.train.processes.end import all_may_start, be_ended_by_signals, restart
from bigdit.train.processes.stop import Stop, Stopped
from bigdit.train.saves import Saves

FILE = "out_of_memory.json"


class OomFallback(Strict):
    """`asked`: the strategy of the config or plan; `now`: the strategy in use after these events."""

    asked: Strategy
    now: Strategy
    events: tuple[OutOfMemory, ...] = ()


def read_oom_fallback(output: Path, asked: Strategy) -> OomFallback:
    """The fallback in this output. A damaged file, or one of another strategy, is logged and ignored."""
    path, none = output / FILE, OomFallback(asked=asked, now=asked)
    try:
        found = OomFallback.model_validate_json(read_checksummed(path))
    except FileNotFoundError:
        return none
    except (OSError, ValidationError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        log.notice(f"note: {path} is not used ({why}): if a step runs out of memory again, it is made smaller again")
        return none
    if found.asked != asked:
        log.notice(f"note: {path} is for other settings than this run's, and is not used")
        return none
    log.notice(f"note: {_written(found.now.step_size)}, since a step ran out of memory before ({path})")
    return found


def write_oom_fallback(output: Path, fallback: OomFallback) -> None:
    """Write the fallback for all later starts. Raises UserError if it cannot be written."""
    write_checksummed(output / FILE, fallback.model_dump_json(indent=1) + "\n")


def smaller_strategy(strategy: Strategy, planned: Sequence[StepSize], blocks: int) -> Strategy | None:
    """A strategy with less memory: the plan's next size, else half the micro-batch, else all `blocks` recomputed.

    None if there is none.
    """
    size = strategy.step_size
    if size in planned[:-1]:
        return strategy.sized(planned[planned.index(size) + 1])
    samples = size.micro_batch_size * size.grad_accum_steps
    for micro_batch_size in range(size.micro_batch_size // 2, 0, -1):
        if samples % micro_batch_size == 0 and not strategy.optimizer_in_backward:
            update = {"micro_batch_size": micro_batch_size, "grad_accum_steps": samples // micro_batch_size}
            return strategy.sized(size.model_copy(update=update))
    whole = {"checkpointed_blocks": "all", "checkpointing": "full", "checkpointed_segments": None}
    now = size.model_dump(include=set(whole))
    recomputes_all = now in (whole, whole | {"checkpointed_blocks": blocks})
    return None if recomputes_all else strategy.sized(size.model_copy(update=whole))


def _written(size: StepSize) -> str:
    """The size by the config's keys."""
    kind = " (selective)" if size.checkpointing == "selective" else ""
    kind += "" if size.checkpointed_segments is None else f", {size.checkpointed_segments.described}"
    return (
        f"strategy.micro_batch_size {size.micro_batch_size}, grad_accum_steps {size.grad_accum_steps}, "
        f"checkpointed_blocks {size.checkpointed_blocks}{kind}"
    )


# Phases before any weight changes. The optimizer's and the EMA's phases may have changed some.
INTACT = ("encode", "forward", "backward")

_LOOK_EVERY_S = 0.5
_KEY = "out of memory"


class Recovery:
    """Surrounds steps, and recovers when one runs out of memory; all processes make one.

    `meter` knows the phase. `fallback`: the strategy in use; `following`: the next one, None if there is none. `peers`
    answer while main threads are inside a step. All processes must be ready within train.grace.
    """

    def __init__(
        self,
        run: RunConfig,
        meter: MemoryMeter,
        fallback: OomFallback,
        following: Strategy | None,
        peers: Peers,
        saves: Saves,
        stop: Stop,
    ) -> None:
        self._output, self._grace = run.output, run.train.grace
        self._meter, self._device, self._peers, self._world = meter, meter.device, peers, peers.world
        self._fallback, self._following = fallback, following
        self._saves, self._stop = saves, stop
        self._step = -1
        self._began: torch.cuda.Event | None = None
        self._restarting, self._over = threading.Lock(), threading.Event()
        self._store: dist.Store | None = None
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Recovery:
        """Listen to the other processes from now on. On a CPU this does nothing."""
        if self._device.type == "cuda":
            self._began = torch.cuda.Event()
            if self._world.world_size > 1:
                # Its own connection: on a shared one this thread would wait for the main thread.
                own = dist.distributed_c10d._get_default_store().clone()
                own.set_timeout(timedelta(seconds=self._grace))
                self._store = dist.PrefixStore("bigdit", own)
                self._listener = threading.Thread(target=self._listen, args=(self._store,), daemon=True)
                self._listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._listener is not None:  # it may be about to restart this process
            self._listener.join()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround the step after `step` finished ones."""
        self._step, self._meter.last_phase = step, ""
        if self._began is not None:
            self._began.record()
        try:
            yield
        except RuntimeError as error:
            if self._device.type != "cuda" or not shortage.ran_out(error):
                raise
            self._recover(error)

    def _recover(self, error: RuntimeError) -> NoReturn:
        """Restart with less memory. Raises UserError if there is no smaller strategy."""
        if self._following is None:
            raise UserError(
                f"{_message(self._event(error, self._fallback.now))}, and there is no smaller one: this has "
                f"{_written(self._fallback.now.step_size)}; `bigdit plan` finds what fits: an optimizer with less "
                "state, strategy.lora, CPU offload, more GPUs"
            ) from None
        event = self._event(error, self._following)
        traceback.clear_frames(error.__traceback__)  # frees what the step held on the GPU
        if self._store is not None:
            event = OutOfMemory.model_validate_json(self._store.compare_set(_KEY, "", event.model_dump_json()))
        self._restart(event)

    def _event(self, error: RuntimeError, after: Strategy) -> OutOfMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return OutOfMemory(
            step=self._step,
            rank=self._world.rank,
            device=torch.cuda.get_device_name(self._device),
            phase=self._meter.last_phase,
            asked_bytes=shortage.asked_bytes(str(error)),
            free_bytes=free,
            total_bytes=total,
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            saved=self._meter.last_phase in INTACT and not self._fallback.now.optimizer_in_backward,
            before=self._fallback.now.step_size,
            after=after.step_size,
        )

    def _listen(self, store: dist.Store) -> None:
        try:
            while not self._over.wait(_LOOK_EVERY_S):
                if store.check([_KEY]):
                    event = OutOfMemory.model_validate_json(store.get(_KEY))
                    break
            else:
                return
        except RuntimeError:  # the store ended, and the run with it
            return
        while self._step < event.step:  # the main thread still saves the step before, or writes its rows
            time.sleep(_LOOK_EVERY_S)
        self._restart(event)

    def _restart(self, event: OutOfMemory) -> NoReturn:
        """Save if the state is intact, write the fallback for later starts, and restart."""
        if not self._restarting.acquire(blocking=False):  # another thread does it
            threading.Event().wait()
        limit = threading.Timer(self._grace, self._give_up, [event])
        limit.daemon = True
        limit.start()
        last = self._save_aside(event)
        self._end_after_signal(max(self._peers.gather(self._stop.signum)), last)
        if not all_may_start(self._store, self._world, self._world.is_main and self._write_fallback(event)):
            os._exit(EXIT_USER)
        be_ended_by_signals()  # later signals must end this process: the restart would forget them
        self._end_after_signal(self._stop.signum, last)
        restart()

    def _end_after_signal(self, signum: int, last: Path | None) -> None:
        if signum:
            if self._world.is_main and last is not None:
                log.notice(str(Stopped(signum, self._saves.step, last)))
            os._exit(128 + signum)

    def _save_aside(self, event: OutOfMemory) -> Path | None:
        """Save while the main thread and its stream may wait for another process.

        Returns the newest checkpoint, None if there is none. After an older one, its next steps are repeated.
        """
        torch.cuda.set_device(self._device)
        assert self._began is not None
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._began)
        with torch.cuda.stream(stream):
            try:
                return self._saves.save_now(event.step if event.saved else self._saves.step)
            except UserError as error:
                if self._world.is_main:
                    log.notice(f"note: the last steps are not saved, and are repeated: {error}")
                return self._saves.last

    def _write_fallback(self, event: OutOfMemory) -> bool:
        """Whether the fallback was written. Without it later starts would run out of memory again and again."""
        asked, now = self._fallback.asked, self._following
        assert now is not None
        try:
            write_oom_fallback(self._output, OomFallback(asked=asked, now=now, events=(*self._fallback.events, event)))
        except UserError as error:
            log.notice(f"error: {_message(event)}, and the smaller strategy cannot be kept: {error}")
            return False
        log.notice(f"note: {_message(event)}; all restart with {_written(event.after)}")
        return True

    def _give_up(self, event: OutOfMemory) -> None:
        if self._world.rank == event.rank:
            print(
                f"error: {_message(event)}, and not all processes were ready to restart within train.grace, "
                f"{self._grace:g} s: all end; the same command resumes from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        os._exit(EXIT_USER)


def _message(event: OutOfMemory) -> str:
    short = shortage.message(event.asked_bytes, event.free_bytes, event.total_bytes, event.reserved_bytes)
    where = f"rank {event.rank} ({event.device}) in {event.phase or 'its start'}"
    return f"step {event.step + 1} ran out of memory on {where}: {short}"
