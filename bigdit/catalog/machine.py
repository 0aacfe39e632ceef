"""The card that `--gpu` and `--gpu-memory` ask for: of the catalogue, a slice of one, or this machine's own.

This machine's cards are as its driver tells of them through nvidia-smi; torch is not asked, for it is slow.
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
NOTABLE_MIB = 1024  # in use by others: less is what drivers and desktops take by themselves
INSTEAD = "name a card instead, such as --gpu a100-80g-sxm (`bigdit gpus` lists all)"


class Reading(NamedTuple):
    """A row of nvidia-smi; memory in MiB. What the driver keeps for itself is neither used nor free; `total_mib` has it
    from driver 510 on."""

    number: str
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    free_mib: int
    mig: bool

    @property
    def usable_mib(self) -> int:
        """What a CUDA process is told of an idle card."""
        return self.used_mib + self.free_mib


def found_gpus() -> tuple[Gpu, ...]:
    """The cards that a run on this machine would see, in the driver's order: the catalogue's rates, the driver's own
    bytes. CUDA_VISIBLE_DEVICES is heeded, its numbers taken in the order of nvidia-smi.

    Raises UserError where there is no card, where the driver cannot be asked, and for a card that the catalogue
    does not have or that MIG has divided.
    """
    readings = _visible(_readings())
    problems = [problem for reading in readings if (problem := _problem(reading)) is not None]
    if problems:
        raise UserError(*problems)
    return tuple(_card(reading) for reading in readings)


def _readings() -> list[Reading]:
    """All cards of the machine. Raises UserError where nvidia-smi is missing, fails, or lists none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise UserError(f"--gpu auto asks nvidia-smi for this machine's cards, and it is not on the PATH; {INSTEAD}")
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"--gpu auto: nvidia-smi did not answer within {TIMEOUT_S} s; {INSTEAD}") from None
    except OSError as error:
        raise UserError(f"--gpu auto: {command} does not run ({error.strerror}); {INSTEAD}") from None
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()
    if said[0] in ("nothing", "No devices were found"):
        raise UserError(f"--gpu auto: nvidia-smi finds no card in this machine; {INSTEAD}")
    if done.returncode != 0:
        raise UserError(f"--gpu auto: nvidia-smi failed with status {done.returncode}: {said[0]}; {INSTEAD}")
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    try:
        return [
            Reading(number, uuid, name.strip(), int(total), int(used), int(free), mig.strip() == "Enabled")
            for number, uuid, name, total, used, free, mig in rows
        ]
    except ValueError:
        raise UserError(
            f"--gpu auto: nvidia-smi tells no memory of a card ({said[0]!r}); name it, with --gpu-memory if need be"
        ) from None


def _visible(readings: list[Reading]) -> list[Reading]:
    """Those that CUDA_VISIBLE_DEVICES lists, up to the first entry that is none of them, which is where CUDA stops."""
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
            f"--gpu auto: CUDA_VISIBLE_DEVICES={listed} shows none of this machine's {len(readings)} cards; unset it, "
            "or name a card, with its slice where MIG divides it (--gpu a100-80g-sxm:3g.40gb)"
        )
    return seen


def _candidate(reading: Reading) -> Gpu | None:
    """The catalogue's card of the driver's name; of several, the one of the nearest memory."""
    candidates = named(reading.name)
    return min(candidates, key=lambda card: abs(card.total_mib - reading.total_mib), default=None)


def _problem(reading: Reading) -> str | None:
    card = _candidate(reading)
    if card is None:
        return (
            f"card {reading.number} of this machine, {reading.name!r} with {reading.usable_mib} MiB, is not in the "
            "catalogue; plan with the rates of one like it: "
            f"--gpu {_near(reading)} --gpu-memory {reading.usable_mib}MiB"
        )
    if reading.mig:
        profiles = mig_profiles(card)
        slices = f": --gpu {card.name}:{profiles[0]} (it has {', '.join(profiles)})" if profiles else ""
        return f"card {reading.number} of this machine, {card.name}, is divided by MIG; name a slice of it{slices}"
    return None


def _near(reading: Reading) -> str:
    """The card that an unknown one is most like: whose whole name it has, or one much like it; else by memory."""
    cards = [g for g in gpus() if g.memory_bounds[0] <= reading.usable_mib * MIB <= g.memory_bounds[1]] or gpus()
    titles = {card.title: card.name for card in cards}
    whole = sorted((title for title in titles if reading.name.startswith(title)), key=len)[-1:]
    alike = whole or difflib.get_close_matches(reading.name, titles, n=1)
    return titles[alike[0]] if alike else min(cards, key=lambda card: abs(card.total_mib - reading.total_mib)).name


def _card(reading: Reading) -> Gpu:
    card = _candidate(reading)
    assert card is not None, "its problem has been raised"
    if reading.used_mib > NOTABLE_MIB:
        log.notice(
            f"card {reading.number}, {card.name}: {reading.used_mib} MiB of {reading.usable_mib} are in use by others "
            "now; the plan takes the whole card"
        )
    told = f"nvidia-smi of this machine: used {reading.used_mib} and free {reading.free_mib} MiB"
    return card.model_copy(
        update={
            "total_mib": max(reading.total_mib, reading.usable_mib),
            "total_verified": True,
            "usable_mib": reading.usable_mib,
            "usable_verified": True,
            "sources": card.sources.model_copy(
                update={"total": f"nvidia-smi of this machine: {reading.total_mib} MiB", "usable": told}
            ),
        }
    )


SLICE = re.compile(r"^(?P<card>.+?)(?::|[\s_-]mig[\s_-])(?P<profile>\S+)$", re.IGNORECASE)


def resolve_gpu(name: str | None, memory: str | None = None) -> Gpu:
    """The card to plan for.

    `name`: one of the catalogue, an alias or a driver's name; `CARD:PROFILE`, a slice as MIG makes it, or as torch
    names it (`NVIDIA A100-SXM4-80GB MIG 3g.40gb`); `auto`, the card of this machine, of several the one with the
    least memory (`machine.found_gpus` has them all). `memory`, such as `46068MiB`, takes the place of the bytes that
    a CUDA process is told; its rates stay the named card's.
    Raises UserError for a name that means no card or several, and for a memory that such a card cannot have.
    """
    if name is None or name.strip().casefold() in ("", "custom"):
        raise UserError(_unnamed(memory))
    card = _named(name.strip())
    return card if memory is None else _with_memory(card, memory)


def _named(name: str) -> Gpu:
    if name.casefold() == "auto":
        cards = found_gpus()
        least = min(cards, key=lambda card: card.usable_bytes)
        if len({card.name for card in cards}) > 1:
            held = ", ".join(f"{card.name} ({gib(card.usable_bytes)})" for card in cards)
            log.notice(f"this machine's cards differ: {held}; planned for the {least.name}, which has the least memory")
        return least
    parts = None if refusal("gpu", name) else SLICE.match(name)  # cuda:0 is no slice
    return gpu(name) if parts is None else mig_slice(gpu(parts["card"]), parts["profile"])


def _unnamed(memory: str | None) -> str:
    if memory is None:
        return "no card was named; --gpu takes one of `bigdit gpus`, or auto for this machine's own"
    asked = _bytes(memory)
    near = sorted(gpus(), key=lambda card: abs(card.total_bytes - asked))[:3]
    like = ", ".join(f"{card.name} ({card.total_mib} MiB)" for card in near)
    return (
        f"--gpu-memory {memory} says nothing of a card's speed; name with --gpu the card whose rates to take, "
        f"nearest in memory: {like}"
    )


def _bytes(memory: str) -> int:
    try:
        return parse_bytes(memory)
    except UserError as error:
        raise UserError(f"--gpu-memory: {error}") from None


def _with_memory(card: Gpu, memory: str) -> Gpu:
    asked = _bytes(memory)
    low, high = card.memory_bounds
    if not low <= asked <= high:
        raise UserError(
            f"--gpu-memory {memory} is {gib(asked)}, and the {card.name}, of {card.total_mib} MiB, can have "
            f"{-(-low // MIB)} to {high // MIB} MiB"
        )
    mib = asked // MIB
    if (card.usable_mib + card.total_mib) / 2 < mib <= card.total_mib:
        log.notice(
            f"--gpu-memory {memory} is the total of the {card.name} in nvidia-smi rather than its used + free, of "
            f"which processes are told: {card.usable_mib} MiB; the plan may promise too much"
        )
    return card.model_copy(
        update={
            "title": f"{card.title} with {mib} MiB",
            "usable_mib": mib,
            "usable_verified": True,
            "total_mib": max(card.total_mib, mib),
            "sources": card.sources.model_copy(
                update={"usable": f"--gpu-memory {memory}, in place of {card.usable_mib} MiB ({card.sources.usable})"}
            ),
        }
    )
