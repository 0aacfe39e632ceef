"""From a question to its plan's page, and to what answers further ones about it."""

from __future__ import annotations

from collections.abc import Callable

from bigdit.live.answers import Answers
from bigdit.live.asked import Asked
from bigdit.rehearse.pool import Pool
from bigdit.report.page import page
from bigdit.report.whatif import start
from bigdit.search.answer import Progress, make_plan
from bigdit.search.finding.evidence import weighed
from bigdit.search.finding.receipts import own_receipts
from bigdit.search.question import Question
from bigdit.search.telling.ways import ways


def live_page(
    question: Question, ask: Callable[[int], Question], *, progress: Progress | None = None
) -> tuple[str, Answers]:
    """The page of the plan for `question`, and what answers it; `ask` is the same question of so many cards.

    Raises UserError where the model cannot be rehearsed.
    """
    plan = make_plan(question, progress=progress)
    offered = ways(plan, ask)
    with Pool() as pool:
        evidence, _ = weighed(pool, question, own_receipts(question)[0])
    answers, first = Answers(offered, evidence), start(plan)
    answers.warm(Asked(
        strategy=first["strategy"], card=first["card"], micro_batch_size=first["micro-batch"],
        checkpointed_blocks=first["blocks"],
    ))  # fmt: skip
    return page(plan, live=offered), answers
