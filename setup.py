"""What setup.cfg cannot say: README as the long description, beside which no file is that its links could reach."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"!?\[([^\]]+)\]\((?![a-z]+:)([^)#]+)(?:#[^)]*)?\)")
WHERE = "\nPaths in parentheses are those of the source distribution.\n"


def description(readme: str) -> str:
    """README with a path in the place of each link or picture that is relative, and a line that says of what."""
    title, rest = readme.split("\n", 1)
    return f"{title}\n{WHERE}{LINK.sub(_named, rest)}"


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return path if text == path else f"{text} ({path})"


setup(long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8")))
