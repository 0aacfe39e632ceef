"""`bigdit.plan(...)`: a plan for Python and notebooks, asked for as `bigdit plan` is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from markupsafe import escape

from bigdit import log
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.ask import question_for
from bigdit.search.plan import Plan
from bigdit.search.question import Question

Options = ParamSpec("Options")

HEIGHT = 900
"""Pixels of the page in a notebook, which scrolls within them."""


class Answer(Plan):
    """A plan that notebooks show as its page."""

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style stays its own."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def _answered(ask: Callable[Options, Question]) -> Callable[Options, Answer]:
    @functools.wraps(ask)
    def plan(*options: Options.args, **named: Options.kwargs) -> Answer:
        question = ask(*options, **named)
        with log.err.status(f"planning the training of {question.model.name}") as status:
            return Answer(**dict(make_plan(question, progress=status.update)))

    plan.__name__ = plan.__qualname__ = "plan"
    plan.__doc__ = f"The plan that answers this question: what `bigdit plan --json` prints.\n\n{ask.__doc__}"
    return plan


plan = _answered(question_for)
