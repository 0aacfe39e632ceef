"""`bigdit.plan(...)`: a plan for Python and notebooks, asked for as `bigdit plan` is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from bigdit import log
from bigdit.search.answer import make_plan
from bigdit.search.ask import question_for
from bigdit.search.plan import Plan
from bigdit.search.question import Question

Options = ParamSpec("Options")


def _answered(ask: Callable[Options, Question]) -> Callable[Options, Plan]:
    @functools.wraps(ask)
    def plan(*options: Options.args, **named: Options.kwargs) -> Plan:
        question = ask(*options, **named)
        with log.err.status(f"planning the training of {question.model.name}") as status:
            return make_plan(question, progress=status.update)

    plan.__name__ = plan.__qualname__ = "plan"
    plan.__doc__ = f"The plan that answers this question: what `bigdit plan --json` prints.\n\n{ask.__doc__}"
    return plan


plan = _answered(question_for)
