"""`make docs` fails, and shows the link, if a link leads to no file or heading."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from commands import BIN, ROOT

BROKEN = "\n[nothing](gone-nowhere.md) [no heading](start.md#no-such-heading)\n"
LINES = 5  # that it builds, where, and for how long


@pytest.fixture
def copied(tmp_path):
    """A copy of the repository with its own docs/, to be changed."""
    for each in ROOT.iterdir():
        if each.name not in ("docs", "build"):
            (tmp_path / each.name).symlink_to(each)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def built(folder):
    """Run the target's command in that folder."""
    (line,) = re.findall(r"\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return subprocess.run(
        [BIN / "mkdocs", *shlex.split(line)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_site_is_built_with_nothing_to_say(copied):
    done = built(copied)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert len(done.stderr.splitlines()) <= LINES
    assert (copied / "build/site/index.html").exists()


def test_a_broken_link_and_a_broken_anchor_end_it(copied):
    page = copied / "docs/errors.md"
    page.write_text(page.read_text() + BROKEN)
    done = built(copied)
    assert done.returncode == 1
    assert "gone-nowhere.md" in done.stderr
    assert "no-such-heading" in done.stderr
