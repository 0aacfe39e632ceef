"""The card that `--gpu` and `--gpu-memory` ask for: of the catalogue, a slice of one, or this machine's own."""

from __future__ import annotations

import re

from bigdit import log
from bigdit.catalog.gpus import Gpu, gpu, gpus
from bigdit.catalog.machine import found_gpus
from bigdit.catalog.mig import mig_slice
from bigdit.catalog.names import refusal
from bigdit.errors import UserError
from bigdit.units import MIB, gib, parse_bytes

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
