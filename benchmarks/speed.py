"""Published training speeds beside the predicted ones: writes benchmarks/speed.md.

    python benchmarks/speed.py [ID ...]

Each claim of speed.json is a published time of a step, with the nearest strategy and what differs in it. It is a
report: no constant of the speed model is fitted to it, and no receipt calibrates the intervals.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from emulated import step_of
from pages import kept

from bigdit import catalog
from bigdit.config.strategy_text import parse_strategy
from bigdit.profile.attempt import request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.speed.seconds import NO_TIME, Interval, StepTime
from bigdit.strategy import Strict

HERE = Path(__file__).parent
PAGE = HERE / "speed.md"

NARROW = 1.5
"""The ratio of an interval's ends that tells one choice from another."""


HEAD = """# Published speeds of training against the roofline

Made by `python benchmarks/speed.py`, from speed.json. Seconds of one optimizer step; nothing is
fitted to them, and no receipt calibrates the intervals. What a claim does otherwise than the strategy
beside it stands in the last column; for those outside it is the likely reason, which was not measured."""


class Claim(Strict):
    """`seconds` of one optimizer step, as published at `source`. `differs`: what the published step does otherwise.
    `outside`: the likely reason if the claim lies outside. If no one strategy describes it, `other` describes parts
    of the step (speed/step.py): used `instead`, or the truth is `between` both."""

    name: str
    source: str
    seconds: float
    model: str
    resolution: int
    gpu: str
    strategy: str
    differs: str
    outside: str | None = None
    other: str | None = None
    between: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()


CLAIMS = [Claim.model_validate(each) for each in json.loads((HERE / "speed.json").read_text())]


def main(wanted: list[str]) -> None:
    found = []
    for claim in CLAIMS:
        if not wanted or claim.name in wanted:
            found.append((claim, _predicted(claim)))
            print(_line(*found[-1]), flush=True)
    if not wanted:
        PAGE.write_text(_document(found))


def _predicted(claim: Claim) -> StepTime:
    found = _timed(claim, claim.strategy)
    if claim.other is None:
        return found
    parts, other = dict(found.parts), _timed(claim, claim.other).parts
    for name in claim.between:
        low, high = min(parts[name].low, other[name].low), max(parts[name].high, other[name].high)
        parts[name] = Interval(low=low, high=high)
    parts |= {name: other[name] for name in claim.instead}
    return StepTime(seconds=sum(parts.values(), NO_TIME), parts=parts)


def _timed(claim: Claim, asked: str) -> StepTime:
    gpu, strategy = catalog.gpu(claim.gpu), parse_strategy([asked])
    request = request_for(catalog.model(claim.model), gpu, strategy, resolution=claim.resolution)
    with EmulatedGpus(gpu, 1, timeout_s=600) as cards:
        return step_of(cards.attempt(request, counted="step"), strategy, gpu)


def _line(claim: Claim, found: StepTime) -> str:
    seconds = found.seconds
    most = sorted(found.parts.items(), key=lambda part: -part[1].high)[:3]
    differs = "; ".join(filter(None, (claim.differs, claim.outside)))
    where = ", ".join(f"{name} {_range(part)}" for name, part in most)
    return (
        f"| [{claim.name}]({claim.source}) | {claim.model} {claim.resolution} px, {claim.gpu}, `{claim.strategy}`"
        f"{_with(claim)} | "
        f"{claim.seconds:.2f} | {_range(seconds)} | {seconds.high / seconds.low:.2f} | "
        f"{_verdict(claim.seconds, seconds)} | {where} | {differs} |"
    )


def _with(claim: Claim) -> str:
    """The step with parts of another strategy's."""
    said = [f"{', '.join(claim.instead)} as"] if claim.instead else []
    said += [f"{', '.join(claim.between)} up to"] if claim.between else []
    return f"; {' and '.join(said)} `{claim.other}`" if claim.other else ""


def _verdict(measured: float, seconds: Interval) -> str:
    if measured > seconds.high:
        return f"slower, {measured / seconds.high:.2f} × high"
    return f"faster, {measured / seconds.low:.2f} × low" if measured < seconds.low else "inside"


def _range(seconds: Interval) -> str:
    return f"{seconds.low:.2f} to {seconds.high:.2f}"


def _document(found: list[tuple[Claim, StepTime]]) -> str:
    inside = sum(_verdict(claim.seconds, step.seconds) == "inside" for claim, step in found)
    ratios: dict[str, list[float]] = {}
    for claim, step in found:
        ratios.setdefault(claim.gpu, []).append(step.seconds.high / step.seconds.low)
    narrow = sum(ratio <= NARROW for each in ratios.values() for ratio in each)
    by_card = ", ".join(f"{gpu} {statistics.median(each):.2f}" for gpu, each in sorted(ratios.items()))
    said = f"""{inside} of {len(found)} are inside; of {narrow} the high end is at most {NARROW} times the low one. Its
median by GPU: {by_card}."""
    heads = "| claim | emulated as | published | ours | high/low | | most of it | what differs |"
    table = [heads, f"|{' --- |' * 8}", *(_line(*each) for each in found)]
    return "\n".join([HEAD, "", said, "", *table, "", kept(PAGE, "## What makes them wide")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="ID")
    asked = parser.parse_args().wanted
    if unknown := {*asked} - {claim.name for claim in CLAIMS}:
        parser.error(f"no ID is called {', '.join(sorted(unknown))}")
    main(asked)
