"""Every library that bigdit imports, early or late, is a requirement in setup.cfg."""

import ast
import re
import sys
from configparser import ConfigParser
from importlib.metadata import packages_distributions

from commands import ROOT

OF_DEVELOPERS = {"dev", "docs", "demo"}
"""Extras that bigdit does not need to run."""


def imported(text):
    """Top-level modules of other projects that a file imports anywhere, but for type checking."""
    tree = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        for inner in ast.walk(each)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) not in for_types:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module)
    return {name.partition(".")[0] for name in found} - {*sys.stdlib_module_names, "bigdit", "bigdit_emulated"}


def normal(name):
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required():
    """Distributions that bigdit and its extras for users require."""
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    lists = [config["options"]["install_requires"]]
    lists += [text for extra, text in config["options.extras_require"].items() if extra not in OF_DEVELOPERS]
    lines = [line.strip() for text in lists for line in text.splitlines()]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines if line and not line.startswith("#")}


def unprovided(modules):
    """Imports that no required distribution has."""
    owners = packages_distributions()
    return sorted(name for name in modules if not {*map(normal, owners.get(name, []))} & required())


def test_what_is_imported_is_asked_for():
    modules = {name for file in (ROOT / "bigdit").rglob("*.py") for name in imported(file.read_text())}
    assert {"torch", "yaml", "av", "elftools"} <= modules
    assert unprovided(modules) == []


def test_a_module_that_nobody_asks_for_is_found():
    text = "import os\nif TYPE_CHECKING:\n    import mypy\ndef f():\n    import pytest.raises\n"
    assert imported(text) == {"pytest"}
    assert unprovided({"pytest", "yaml"}) == ["pytest"]
