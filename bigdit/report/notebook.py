"""`bigdit.plan(...)`: a plan for Python and notebooks, asked for as `bigdit plan` is."""

from __future__ import annotations

import inspect
import re
from typing import Any

from markupsafe import escape

from bigdit import log
from bigdit.errors import UserError
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.ask import question_for
from bigdit.search.plan import Plan
from bigdit.search.request import OPTIONS

_OPTION = re.compile(r"(?<!\S)--([a-z-]+)")

HEIGHT = 900
"""Pixels of the page in a notebook, which scrolls within them."""


class Answer(Plan):
    """A plan that notebooks show as its page."""

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style stays its own."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def plan(model: str | None = None, gpu: str | None = None, **options: Any) -> Answer:
    """The plan that these options of `bigdit plan` ask for; what is None is as there."""
    try:
        question = question_for(model, gpu, **options)
    except UserError as error:  # of arguments, which are options with underscores
        lines = [_OPTION.sub(lambda found: found[1].replace("-", "_"), line) for line in error.problems]
        raise UserError(*lines) from None
    with log.status(f"planning the training of {question.model.name}") as status:
        return Answer(**dict(make_plan(question, progress=status)))


_HELP = "\n".join(f"{name}: {known['help']}" for name, known in OPTIONS.items())
plan.__doc__ = f"{plan.__doc__}\n\n{_HELP}"
plan.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in OPTIONS],
    return_annotation=Plan.__name__,
)
