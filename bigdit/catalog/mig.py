"""Slices of a card, as Multi-Instance GPU makes them: `a100-80g-sxm:3g.40gb` is a card of its own to a process."""

from __future__ import annotations

import re
from functools import cache

from pydantic import PositiveFloat, PositiveInt

from bigdit.catalog.gpus import Gpu, Sources, Tflops
from bigdit.catalog.names import load_json
from bigdit.errors import UserError
from bigdit.spec import Strict

MEDIA_ENGINES = r"[+-](me\.all|me|gfx)"
"""What a profile's name says of engines for video and graphics: nothing of memory and multiprocessors."""


class Profile(Strict):
    """An instance's memory in GiB, multiprocessors and memory slices; `sighted` unless derived from the guide."""

    gib: PositiveFloat
    sms: PositiveInt
    slices: PositiveInt
    sighted: bool = True


class Layout(Strict):
    """How `cards` of `sms` multiprocessors and so many memory slices are divided; `source` is of the listing."""

    cards: tuple[str, ...]
    sms: PositiveInt
    slices: PositiveInt
    source: str
    profiles: dict[str, Profile]


@cache
def _layouts() -> dict[str, Layout]:
    layouts = [Layout.model_validate(entry) for entry in load_json("mig.json")["layouts"]]
    return {card: layout for layout in layouts for card in layout.cards}


def mig_profiles(card: Gpu) -> tuple[str, ...]:
    """The names of the slices that a card can be divided into; none for a card without MIG."""
    layout = _layouts().get(card.name)
    return () if layout is None else tuple(layout.profiles)


def mig_slice(card: Gpu, profile: str) -> Gpu:
    """The slice as a card of its own: compute by its share of the multiprocessors, bandwidth by its share of the
    memory slices, and no NVLink, since MIG lets instances reach no other GPU; PCIe is shared with the others.

    Raises UserError for a card without MIG and for a profile that it does not have.
    """
    layout = _layouts().get(card.name)
    if layout is None:
        raise UserError(f"{card.name} has no MIG slices here; cards that have: {', '.join(_layouts())}")
    name = re.sub(rf"{MEDIA_ENGINES}$", "", profile.casefold())
    found = layout.profiles.get(name)
    if found is None:
        raise UserError(f"{card.name} has no MIG profile {profile!r}; it has {', '.join(layout.profiles)}")
    guide = load_json("mig.json")["guide"]
    usable_mib = min(int(found.gib * 1024), card.usable_mib)
    origin = layout.source if found.sighted else f"derived: multiples of a smaller profile of {layout.source}"
    compute, bandwidth = found.sms / layout.sms, found.slices / layout.slices
    return card.model_copy(
        update={
            "name": f"{card.name}:{name}",
            "title": f"{card.title} MIG {name}",
            "multiprocessors": found.sms,
            "l2_mib": None,
            "total_mib": usable_mib,
            "total_verified": found.sighted,
            "usable_mib": usable_mib,
            "usable_verified": found.sighted,
            "tflops": _scaled(card.tflops, compute),
            "bandwidth_gbs": round(card.bandwidth_gbs * bandwidth, 1),
            "nvlink_gbs": None,
            "sources": Sources(
                total=origin,
                usable=origin,
                multiprocessors=origin,
                compute=f"{found.sms} of {layout.sms} multiprocessors ({origin}); the card: {card.sources.compute}",
                bandwidth=f"{found.slices} of {layout.slices} memory slices ({guide}); the card: "
                f"{card.sources.bandwidth}",
                link=f"no peer-to-peer under MIG, PCIe shared with the other instances ({guide}); the card: "
                f"{card.sources.link}",
            ),
        }
    )


def _scaled(rates: Tflops, share: float) -> Tflops:
    return Tflops.model_validate(
        {name: None if rate is None else round(rate * share, 2) for name, rate in rates.model_dump().items()}
    )
