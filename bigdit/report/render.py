"""Templates of pages: what is shown in them is escaped, and what they ask for is there."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, filters: dict[str, Any], shown: dict[str, Any]) -> str:
    """The page that the template of this name makes of what is `shown`."""
    environment = Environment(
        loader=PackageLoader("bigdit.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= filters
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # in the order in which it is given
    return environment.get_template(template).render(shown)
