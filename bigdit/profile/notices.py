"""Notes on the figures of emulated steps."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bigdit.strategy import FACTORED, PACKAGES, Strategy

TESTED_WITH: Mapping[str, tuple[str, str]] = {
    "torch": ("2.11.0", "2.15.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "diffusers": ("0.42.1", "0.42.1"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "torchao": ("0.18.0", "0.18.0"),
    "prodigyopt": ("1.1.2", "1.1.2"),
    "schedulefree": ("1.4.1", "1.4.1"),
}
"""The first and the last version with which tests run steps on emulated GPUs. Torch 2.13 runs in all of them."""


def notices(strategy: Strategy, versions: Mapping[str, str]) -> tuple[str, ...]:
    """Versions outside the tested range, and what an engine makes impossible."""
    others = {*PACKAGES.values()} - {PACKAGES.get(strategy.optimizer.name)}
    found = [
        f"{name} {versions[name]} is outside the versions that bigdit was tested with "
        f"({first if first == last else f'{first} to {last}'})"
        for name, (first, last) in TESTED_WITH.items()
        if name not in others and not _numbers(first) <= _numbers(versions.get(name, "")) <= _numbers(last)
    ]
    if strategy.zero_stage and strategy.optimizer.name in FACTORED:
        found.append(
            f"ZeRO-{strategy.zero_stage} hands {strategy.optimizer.name} flat partitions, which cannot be factored: "
            "its second moment is whole here, and priced so; engine fsdp2 keeps the factors"
        )
    return tuple(found)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
