"""What the referee found, as a page: how often both sides agree to the byte, how far they are apart, and by what."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bigdit.bench.against_card import Against, Difference, PhaseAgainst

from bigdit.units import MIB
from refereed.known import BY_DATA
from refereed.rows import Row

Judged = Sequence[tuple[Row, Against | str]]

HEAD = """# The rehearsal against the emulated card

`make referee` writes this page. Each row is one question, answered twice: by the rehearsal, with the CPU build of torch
and the rules of `bigdit/rehearse`, and by the CUDA build of torch on an emulated card (`bigdit/emulator`): the same
engine and the same two steps, with torch's own kernels' host code and its own caching allocator, whose history and
counters are what is compared. *Allocated* is the peak of a phase in blocks of 512 B; *reserved* is the card's counter
beside the replay of the rehearsed events through `bigdit/memory/caching.py`. What neither side knows of a real card:
cuDNN's choice of workspace and the context.
"""

_MOST_OPERATORS = 40


@dataclass(frozen=True)
class Spread:
    """Of differences as shares of the card's bytes, without their signs."""

    median: float
    p95: float
    worst: float
    equal: float

    @classmethod
    def of(cls, phases: Sequence[PhaseAgainst], kind: str) -> Spread:
        shares = sorted(share(phase, kind) for phase in phases)
        p95 = shares[math.ceil(0.95 * len(shares)) - 1]
        return cls(statistics.median(shares), p95, shares[-1], sum(share == 0 for share in shares) / len(shares))


def share(phase: PhaseAgainst, kind: str) -> float:
    """How far the rehearsal is from the card, of the card's bytes; `kind`: allocated or reserved."""
    rehearsed, card = getattr(phase, f"rehearsed_{kind}_bytes"), getattr(phase, f"card_{kind}_bytes")
    return abs(rehearsed - card) / card if card else float(rehearsed > 0)


def is_equal(found: Against) -> bool:
    """Whether allocated is equal to the byte in every phase."""
    return not any(phase.allocated_difference for phase in found.phases)


def page(judged: Judged, asked: int, versions: str) -> str:
    """The whole of benchmarks/referee.md, of the rows so far out of those `asked`."""
    answered = [(row, found) for row, found in judged if isinstance(found, Against)]
    failed = [(row, found) for row, found in judged if isinstance(found, str)]
    parts = [HEAD, f"{versions}.\n", *_summary(answered, asked), *_by("By phase", "phase", _by_phase(answered))]
    parts += _by("By engine", "engine", _by_row(answered, _engine))
    parts += _by("By card", "card", _by_row(answered, lambda row: row.gpu))
    parts += _operators(answered)
    parts += _apart(answered)
    if failed:
        parts += ["\n## Rows without an answer\n", *(f"- {row.name}: {_line(why)}" for row, why in failed)]
    return "\n".join(parts) + "\n"


def _summary(answered: Sequence[tuple[Row, Against]], asked: int) -> Iterator[str]:
    phases = [phase for _, found in answered for phase in found.phases]
    allocated, reserved = Spread.of(phases, "allocated"), Spread.of(phases, "reserved")
    equal = sum(is_equal(found) for _, found in answered)
    exact = sum(found.allocator_exact for _, found in answered)
    yield f"- {asked} rows are asked; both sides have answered {len(answered)}"
    part = f"{equal} rows ({equal / len(answered):.1%})"
    yield f"- allocated equal to the byte in every phase: {part}; worst {_share(allocated.worst)}"
    yield f"- reserved: median {_share(reserved.median)}, P95 {_share(reserved.p95)}, worst {_share(reserved.worst)}"
    yield f"- our allocator, fed with the card's own events, has the card's own counters in {exact} rows"


def _by_phase(answered: Sequence[tuple[Row, Against]]) -> dict[str, list[PhaseAgainst]]:
    found: dict[str, list[PhaseAgainst]] = defaultdict(list)
    for _, each in answered:
        for phase in each.phases:
            found[phase.phase].append(phase)
    return found


def _by_row(answered: Sequence[tuple[Row, Against]], key: Callable[[Row], str]) -> dict[str, list[PhaseAgainst]]:
    found: dict[str, list[PhaseAgainst]] = defaultdict(list)
    for row, each in answered:
        found[key(row)] += each.phases
    return found


def _engine(row: Row) -> str:
    return row.strategy.partition(",")[0]


def _by(title: str, what: str, groups: dict[str, list[PhaseAgainst]]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"| {what} | phases | allocated equal | median | P95 | worst | reserved equal | median | P95 | worst |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, phases in groups.items():
        cells = []
        for kind in ("allocated", "reserved"):
            spread = Spread.of(phases, kind)
            cells += [f"{spread.equal:.1%}", *map(_share, (spread.median, spread.p95, spread.worst))]
        yield f"| {name} | {len(phases)} | {' | '.join(cells)} |"


def _operators(answered: Sequence[tuple[Row, Against]]) -> Iterator[str]:
    """Blocks that one side alone has, by operator: those live at a peak that differs first."""
    rows: dict[tuple[bool, str, str], set[str]] = defaultdict(set)
    largest: Counter[tuple[bool, str, str]] = Counter()
    for row, found in answered:
        for each in found.differences:
            key = (each.at_peak, each.side, each.operator)
            rows[key].add(row.name)
            largest[key] = max(largest[key], each.nbytes * each.count)
    yield "\n## What remains, by operator\n"
    if not rows:
        yield "Nothing: both sides allocate the same blocks in the same order, in every row."
        return
    yield "Blocks that only one side has, first those that are live at a peak that differs, then those below all peaks."
    yield "The rehearsal's are named by category and module.\n"
    yield "| live at a peak that differs | only | operator | rows | most in a phase |"
    yield "|---|---|---|---|---|"
    order = sorted(rows, key=lambda key: (not key[0], -largest[key]))
    for at_peak in (True, False):
        for key in [key for key in order if key[0] == at_peak][:_MOST_OPERATORS]:
            bytes_ = f"{largest[key]:,} B"
            yield f"| {'yes' if key[0] else 'no'} | {key[1]} | `{key[2]}` | {len(rows[key])} | {bytes_} |"


def _apart(answered: Sequence[tuple[Row, Against]]) -> Iterator[str]:
    """Rows that differ in allocated, or by more than 0.5 % in reserved."""
    yield "\n## Rows that differ\n"
    yield "In allocated at all, or in reserved by more than 0.5 %: the phase furthest apart, rehearsed less card.\n"
    yield "| row | phase | allocated | reserved | largest cause |"
    yield "|---|---|---|---|---|"
    for row, found in answered:
        worst = max(range(len(found.phases)), key=lambda at: _apartness(found.phases[at]))
        phase = found.phases[worst]
        if is_equal(found) and share(phase, "reserved") <= 0.005:
            continue
        allocated = f"{phase.allocated_difference / MIB:+,.3f} MiB ({_share(share(phase, 'allocated'))})"
        reserved = f"{phase.reserved_difference / MIB:+,.1f} MiB ({_share(share(phase, 'reserved'))})"
        cause = BY_DATA.get(row.model) or _cause(found, worst)
        yield f"| {row.name} | {phase.phase} | {allocated} | {reserved} | {cause} |"


def _apartness(phase: PhaseAgainst) -> tuple[float, float]:
    return share(phase, "allocated"), share(phase, "reserved")


def _cause(found: Against, span: int) -> str:
    """The largest block that one side alone has: at the peak, or in this phase, or in one before."""
    upto = [each for each in found.differences if each.span <= span]
    at_peak = [each for each in upto if each.at_peak and each.span == span]
    here = [each for each in upto if each.span == span]
    for candidates in (at_peak, here, upto):
        if candidates:
            return _named(max(candidates, key=lambda each: each.nbytes * each.count))
    return "the order of frees"


def _named(each: Difference) -> str:
    return f"{each.side}: {each.count} × {each.nbytes:,} B `{each.operator}`"


def _line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{lines[0]} … {lines[-1]}" if len(lines) > 1 else text


def _share(value: float) -> str:
    return "0" if value == 0 else f"{value:.2%}" if value >= 0.0001 else "< 0.01%"
