"""HTML pages: templates that escape all values, and figures as inline SVG in the style of the page."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bigdit.memory import CATEGORIES, Category
from bigdit.report.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: str, filters: dict[str, Any], shown: dict[str, Any]) -> str:
    """The page that a template makes of the values in `shown`, with the colours of categories."""
    environment = Environment(
        loader=PackageLoader("bigdit.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= filters
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # in the given order
    colours = {variable(category): (COLOURS[category], DARK[category]) for category in CATEGORIES}
    return environment.get_template(template).render(shown, colours=colours)


DARK: dict[Category, str] = COLOURS | {"parameter": "#7466D9", "workspace": "#FFFFFF"}
"""COLOURS on a dark page: two are lighter there."""


def variable(category: Category) -> str:
    """The CSS variable of a category's colour."""
    return f"--{category.lower().replace(' ', '-')}"


def inline(figure: Figure, name: str, title: str, description: str) -> Markup:
    """The figure as an <svg> element; `name` makes its ids unique on the page.

    `title` and `description` are for screen readers.
    """
    import matplotlib

    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<(metadata|style).*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font(-family)?: [^;\"]*?(?=[;\"])", _font, text)
    on_page = {colour: f"var({variable(category)})" for category, colour in COLOURS.items()}
    for colour, value in (on_page | {"#000000": "currentColor", "#ffffff": "var(--paper)"}).items():
        text = re.sub(re.escape(colour), value, text, flags=re.IGNORECASE)
    label = Markup('<svg role="img" aria-labelledby="{0}-title {0}-desc"').format(name)
    head = Markup('<title id="{0}-title">{1}</title><desc id="{0}-desc">{2}</desc>').format(name, title, description)
    opening, _, rest = text.removeprefix("<svg").partition(">")
    return Markup(f"{label}{opening}>{head}{rest}")  # matplotlib has escaped what it was given


def _font(style: re.Match[str]) -> str:
    """The page's font in the size and weight that the figure asks for."""
    size = re.search(r"[\d.]+px", style[0])
    weight = "font-weight: bold; " if "bold" in style[0] or " 700 " in style[0] else ""
    return f"{weight}font-size: {size[0]}" if size else ""
