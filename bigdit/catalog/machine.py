"""The GPU of `--gpu` and `--gpu-memory`: one of the catalogue, a slice, or this machine's.

This machine's GPUs are read from nvidia-smi, because importing torch is slow.
"""

from __future__ import annotations

import csv
import difflib
import os
import re
import shutil
import subprocess
from typing import NamedTuple

from bigdit import log
from bigdit.catalog.gpus import Gpu, gpu, gpus, mig_profiles, mig_slice, named
from bigdit.catalog.names import refusal
from bigdit.errors import UserError
from bigdit.units import MIB, gib, parse_bytes

FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "memory.free", "mig.mode.current")
TIMEOUT_S = 60
NOTABLE_MIB = 1024  # in use by others; drivers and desktops use less
INSTEAD = "name a GPU instead, such as --gpu a100-80g-sxm (`bigdit gpus` lists all)"


class Reading(NamedTuple):
    """A row of nvidia-smi; memory in MiB. The driver's own part is neither used nor free, but in `total_mib` since
    driver 510."""

    number: str
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    free_mib: int
    mig: bool

    @property
    def usable_mib(self) -> int:
        """What a CUDA process sees of an idle GPU."""
        return self.used_mib + self.free_mib


def found_gpus() -> tuple[Gpu, ...]:
    """The GPUs that a run on this machine sees, in the driver's order: the catalogue's rates, the driver's bytes.

    CUDA_VISIBLE_DEVICES is obeyed, with numbers as in nvidia-smi. Raises UserError without a GPU or a driver, for a GPU
    that is not in the catalogue, and for one that MIG divides.
    """
    readings = _visible(_readings())
    problems = [problem for reading in readings if (problem := _problem(reading)) is not None]
    if problems:
        raise UserError(*problems)
    return tuple(_gpu(reading) for reading in readings)


def _readings() -> list[Reading]:
    """All GPUs of the machine. Raises UserError if nvidia-smi is missing, fails, or lists none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise UserError(f"--gpu auto needs nvidia-smi, which is not on the PATH; {INSTEAD}")
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"--gpu auto: nvidia-smi did not answer within {TIMEOUT_S} s; {INSTEAD}") from None
    except OSError as error:
        raise UserError(f"--gpu auto: {command} does not run ({error.strerror}); {INSTEAD}") from None
    output = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()
    if output[0] in ("nothing", "No devices were found"):
        raise UserError(f"--gpu auto: nvidia-smi finds no GPU in this machine; {INSTEAD}")
    if done.returncode != 0:
        raise UserError(f"--gpu auto: nvidia-smi failed with status {done.returncode}: {output[0]}; {INSTEAD}")
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    try:
        return [
            Reading(number, uuid, name.strip(), int(total), int(used), int(free), mig.strip() == "Enabled")
            for number, uuid, name, total, used, free, mig in rows
        ]
    except ValueError:
        raise UserError(
            f"--gpu auto: nvidia-smi shows no memory of a GPU ({output[0]!r}); name it, with --gpu-memory if needed"
        ) from None


def _visible(readings: list[Reading]) -> list[Reading]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, up to the first unknown entry, where CUDA stops too."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return readings
    seen: list[Reading] = []
    for entry in (part.strip() for part in listed.split(",")):
        match = [r for r in readings if entry == r.number or (entry.startswith("GPU-") and r.uuid.startswith(entry))]
        if not match:
            break
        seen.append(match[0])
    if not seen:
        raise UserError(
            f"--gpu auto: CUDA_VISIBLE_DEVICES={listed} shows none of this machine's {len(readings)} GPUs; unset it, "
            "or name a GPU, with its slice where MIG divides it (--gpu a100-80g-sxm:3g.40gb)"
        )
    return seen


def _candidate(reading: Reading) -> Gpu | None:
    """The catalogue's GPU of the driver's name; of several the one with the nearest memory."""
    candidates = named(reading.name)
    return min(candidates, key=lambda found: abs(found.total_mib - reading.total_mib), default=None)


def _problem(reading: Reading) -> str | None:
    found = _candidate(reading)
    if found is None:
        return (
            f"GPU {reading.number} of this machine, {reading.name!r} with {reading.usable_mib} MiB, is not in the "
            "catalogue; plan with the rates of one like it: "
            f"--gpu {_near(reading)} --gpu-memory {reading.usable_mib}MiB"
        )
    if reading.mig:
        profiles = mig_profiles(found)
        slices = f": --gpu {found.name}:{profiles[0]} (it has {', '.join(profiles)})" if profiles else ""
        return f"GPU {reading.number} of this machine, {found.name}, is divided by MIG; name a slice of it{slices}"
    return None


def _near(reading: Reading) -> str:
    """The GPU nearest to an unknown one: by its whole name, a similar name, or its memory."""
    known = [g for g in gpus() if g.memory_bounds[0] <= reading.usable_mib * MIB <= g.memory_bounds[1]] or gpus()
    titles = {found.title: found.name for found in known}
    whole = sorted((title for title in titles if reading.name.startswith(title)), key=len)[-1:]
    alike = whole or difflib.get_close_matches(reading.name, titles, n=1)
    return titles[alike[0]] if alike else min(known, key=lambda found: abs(found.total_mib - reading.total_mib)).name


def _gpu(reading: Reading) -> Gpu:
    found = _candidate(reading)
    assert found is not None, "its problem has been raised"
    if reading.used_mib > NOTABLE_MIB:
        log.notice(
            f"GPU {reading.number}, {found.name}: {reading.used_mib} MiB of {reading.usable_mib} are in use by other "
            "programs; the plan assumes the whole GPU"
        )
    usable = f"nvidia-smi of this machine: used {reading.used_mib} and free {reading.free_mib} MiB"
    return found.model_copy(
        update={
            "total_mib": max(reading.total_mib, reading.usable_mib),
            "usable_mib": reading.usable_mib,
            "usable_verified": True,
            "sources": found.sources.model_copy(
                update={"total": f"nvidia-smi of this machine: {reading.total_mib} MiB", "usable": usable}
            ),
        }
    )


SLICE = re.compile(r"^(?P<gpu>.+?)(?::|[\s_-]mig[\s_-])(?P<profile>\S+)$", re.IGNORECASE)


def resolve_gpu(name: str | None, memory: str | None = None) -> Gpu:
    """The GPU to plan for.

    `name`: a name of the catalogue, an alias or a driver's name; a slice, `GPU:PROFILE` or torch's
    `NVIDIA A100-SXM4-80GB MIG 3g.40gb`; `auto`, this machine's GPU with the least memory (`found_gpus` has all).
    `memory`, such as `46068MiB`, replaces the usable bytes. Raises UserError for an unknown or ambiguous name, and for
    a memory that such a GPU cannot have.
    """
    if name is None or name.strip().casefold() in ("", "custom"):
        raise UserError(_unnamed(memory))
    found = _named(name.strip())
    return found if memory is None else _with_memory(found, memory)


def _named(name: str) -> Gpu:
    if name.casefold() == "auto":
        known = found_gpus()
        least = min(known, key=lambda found: found.usable_bytes)
        if len({found.name for found in known}) > 1:
            held = ", ".join(f"{found.name} ({gib(found.usable_bytes)})" for found in known)
            log.notice(f"this machine's GPUs differ: {held}; planned for the {least.name}, which has the least memory")
        return least
    parts = None if refusal("gpu", name) else SLICE.match(name)  # cuda:0 is no slice
    return gpu(name) if parts is None else mig_slice(gpu(parts["gpu"]), parts["profile"])


def _unnamed(memory: str | None) -> str:
    if memory is None:
        return "no GPU was named; --gpu takes one of `bigdit gpus`, or auto for this machine's own"
    asked = _bytes(memory)
    near = sorted(gpus(), key=lambda found: abs(found.total_bytes - asked))[:3]
    like = ", ".join(f"{found.name} ({found.total_mib} MiB)" for found in near)
    return (
        f"--gpu-memory {memory} says nothing of speed; name a GPU with the right rates by --gpu, "
        f"nearest in memory: {like}"
    )


def _bytes(memory: str) -> int:
    try:
        return parse_bytes(memory)
    except UserError as error:
        raise UserError(f"--gpu-memory: {error}") from None


def _with_memory(found: Gpu, memory: str) -> Gpu:
    asked = _bytes(memory)
    low, high = found.memory_bounds
    if not low <= asked <= high:
        raise UserError(
            f"--gpu-memory {memory} is {gib(asked)}, and the {found.name}, of {found.total_mib} MiB, can have "
            f"{-(-low // MIB)} to {high // MIB} MiB"
        )
    mib = asked // MIB
    if (found.usable_mib + found.total_mib) / 2 < mib <= found.total_mib:
        log.notice(
            f"--gpu-memory {memory} is the total of the {found.name} in nvidia-smi and not its used + free, "
            f"{found.usable_mib} MiB, which processes see; the plan may be too optimistic"
        )
    return found.model_copy(
        update={
            "title": f"{found.title} with {mib} MiB",
            "usable_mib": mib,
            "usable_verified": True,
            "total_mib": max(found.total_mib, mib),
            "sources": found.sources.model_copy(
                update={"usable": f"--gpu-memory {memory}, in place of {found.usable_mib} MiB ({found.sources.usable})"}
            ),
        }
    )
