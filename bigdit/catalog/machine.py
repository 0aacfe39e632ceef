"""This machine's own cards, as its driver tells of them through nvidia-smi; torch is not asked, for it is slow."""

from __future__ import annotations

import csv
import difflib
import os
import shutil
import subprocess
from typing import NamedTuple

from bigdit import log
from bigdit.catalog.gpus import Gpu, gpus, named
from bigdit.catalog.mig import mig_profiles
from bigdit.errors import UserError
from bigdit.units import MIB

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
