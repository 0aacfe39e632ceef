"""What a moving average would take where the question asks for none: nobody has to ask again to see that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Option
from bigdit.search.predict.anchors import OF_STATE, SIZES, Sample, outline, requests
from bigdit.search.predict.average import averaged
from bigdit.search.predict.outline import Arrangement, Outline
from bigdit.search.question import Question
from bigdit.spec import EmaSpec

PLACES: dict[Literal["gpu", "cpu"], str] = {"gpu": "card", "cpu": "host"}


def averages(pool: Pool, sample: Sample, question: Question, options: Sequence[Option], chosen: Option) -> list[Option]:
    """The options that share activations with the chosen one, with an average on the card and on the host, from two
    rehearsals of shallow siblings for each place; none where the question has an average, or the engine takes none."""
    if question.pins.ema != "none":
        return []
    base = chosen.proposal.base or chosen.proposal
    first = base.strategy.model_copy(update={"checkpointing": "full"})
    alike = [
        option
        for option in options
        if option.proposal.strategy.checkpointing == "full"
        and (option.proposal.base or option.proposal).strategy == first
    ]
    asked = [first.model_copy(update={"ema": EmaSpec(device=device), "checkpointed_blocks": 0}) for device in PLACES]
    answers = pool.rehearse([request for each in asked for request in requests(sample, each, SIZES[:1], OF_STATE)])
    each = len(answers) // len(asked)
    found = []
    for at, (device, strategy) in enumerate(zip(PLACES, asked, strict=True)):
        known = [answer for answer in answers[at * each : (at + 1) * each] if isinstance(answer, RehearsedSize)]
        if len(known) == each:
            other = outline(sample.model, strategy, known, OF_STATE)
            found += [_with_average(option, alike[0].arrangement.none, other, device) for option in alike]
    return found


def _with_average(option: Option, base: Outline, other: Outline, device: Literal["gpu", "cpu"]) -> Option:
    proposal = replace(
        option.proposal,
        title=f"{option.proposal.title}, EMA on the {PLACES[device]}",
        strategy=option.proposal.strategy.model_copy(update={"ema": EmaSpec(device=device)}),
    )
    none, full = (averaged(each, base, other) for each in (option.arrangement.none, option.arrangement.full))
    return option.like(Option(proposal, Arrangement(none, full, option.arrangement.blocks)))
