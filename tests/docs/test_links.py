"""Links of the pages lead to existing files and headings."""

import re

import pytest
from carried import carried, place
from commands import ROOT

TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def broken(text, folder):
    """Links of a text in that folder that lead to no file, or to no heading."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for link, path, anchor in re.findall(r"\]\((?!\w+:)(([^)#\s]*)#?([^)\s]*))\)", prose):
        file = folder / path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text() if path else text)):
            found.append(link)
    return found


def anchors(text):
    """Anchors of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    assert broken(file.read_text(), file.parent) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, here\n")
    text = (
        "[a](there.md) [b](there.md#a-heading-here) [c](gone.md) [d](there.md#other) [e](https://example.org) `[f](f)`"
    )
    assert broken(text, tmp_path) == ["gone.md", "there.md#other"]


@pytest.mark.parametrize("file", ["CONTRIBUTING.md", "ARCHITECTURE.md", "docs/contributing.md"])
def test_files_that_contributors_are_sent_to_are_there(file):
    named = re.findall(r"(?<![\w/])(?:bigdit|tests|benchmarks|docs|launch)/[\w/.-]*\w", (ROOT / file).read_text())
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_contributors_find_what_a_change_touches():
    """Every path in the table exists, below bigdit/ or the repository, and every name is in one of them."""
    table = "\n".join(re.findall(r"^\| an? .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    paths = [path for path in re.findall(r"`(\w+/[\w./]*)`", table) if "NAME" not in path]
    assert [path for path in paths if not any((folder / path).exists() for folder in (ROOT, ROOT / "bigdit"))] == []
    groups = re.findall(r"((?:`\w+`(?:, | and | or )?)+) in `([\w/]+\.py)`", table)
    named = [(name, path) for names, path in groups for name in re.findall(r"\w+(?=`)", names)]
    assert len(named) > 10
    assert [(name, path) for name, path in named if name not in (ROOT / "bigdit" / path).read_text()] == []


def test_what_pages_link_to_comes_along():
    found = carried()
    assert {
        "README.md",
        "ARCHITECTURE.md",
        "benchmarks/README.md",
        "benchmarks/gpu_matrix.md",
        "benchmarks/memory.png",
    } <= {*found}
    assert not [path for path in found if path.startswith("docs/")]
    assert (place("README.md"), place("docs/plan.md")) == ("index.md", "plan.md")
