"""`bigdit.plan(...)`: a plan for Python and notebooks, asked for as `bigdit plan` is."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec

from markupsafe import escape

from bigdit import log
from bigdit.errors import UserError, nearest
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.ask import question_for
from bigdit.search.plan import Plan
from bigdit.search.question import Question

Options = ParamSpec("Options")

_OPTION = re.compile(r"(?<!\S)--([a-z-]+)")

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
        question = _asked(ask, *options, **named)
        with log.status(f"planning the training of {question.model.name}") as status:
            return Answer(**dict(make_plan(question, progress=status)))

    plan.__name__ = plan.__qualname__ = "plan"
    _, _, options = (ask.__doc__ or "").partition("\n\n")
    plan.__doc__ = f"The plan that these options of `bigdit plan` ask for; what is None is as there.\n\n{options}"
    plan.__annotations__ = ask.__annotations__ | {"return": Plan.__name__}
    plan.__signature__ = inspect.signature(ask).replace(return_annotation=Plan.__name__)  # type: ignore[attr-defined]
    return plan


def _asked(ask: Callable[Options, Question], *options: Options.args, **named: Options.kwargs) -> Question:
    """The question; what is wrong with it is said of arguments, which are options with underscores."""
    known = inspect.signature(ask).parameters
    if unknown := [name for name in named if name not in known]:
        raise TypeError(f"bigdit.plan has no argument {unknown[0]!r}; {nearest(unknown[0], known)}")
    if twice := [name for name, _ in zip(known, options, strict=False) if name in named]:
        raise TypeError(f"bigdit.plan has the argument {twice[0]!r} twice: by its place and by its name; leave one out")
    try:
        return ask(*options, **named)
    except UserError as error:
        lines = [_OPTION.sub(lambda found: found[1].replace("-", "_"), line) for line in error.problems]
        raise UserError(*lines) from None


plan = _answered(question_for)
