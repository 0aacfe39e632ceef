"""No control character of a file name reaches a terminal, and no line is taken for markup."""

import os

import pytest

from bigdit import log
from bigdit.errors import EXIT_BUG, EXIT_USER, UserError, guard, shown
from bigdit.report.tables import table

HOSTILE = os.fsdecode(b"/data/[/b]\x1b]0;owned\x07\xff\r\x9b1m") + "\u202egnp"
SHOWN = r"/data/[/b]\x1b]0;owned\x07\xff\x0d\x9b1m\u202egnp"


def test_control_characters_are_shown_and_others_stay():
    assert shown("größer 日本 👍🏽 [bold]\nline") == "größer 日本 👍🏽 [bold]\nline"
    assert shown("\ud800") == r"\ud800"


@pytest.fixture
def printed(capfd):
    """All that was written to both streams."""
    return lambda: "".join(capfd.readouterr())


def test_errors_notices_and_reports_show_file_names(printed):
    def fail():
        raise UserError(f"{HOSTILE} is damaged", "another")

    assert guard(fail) == EXIT_USER
    assert printed() == f"error: {SHOWN} is damaged\nerror: another\n"
    log.notice(f"{HOSTILE} is damaged :warning:")
    assert printed() == f"{SHOWN} is damaged :warning:\n"
    log.say(HOSTILE)
    assert printed() == f"{SHOWN}\n"


def test_a_bugs_traceback_and_tables_show_them_too(printed):
    def fail():
        raise ValueError(HOSTILE)

    assert guard(fail) == EXIT_BUG
    assert f"ValueError: {SHOWN}\n" in printed()
    rows = table("", ["name"])
    rows.add_row("a\x1b[31m")
    log.out.print(rows)
    rows = table("", ["name", "size"], numeric=["size"])
    rows.add_row("b\x1b[31m", f"\x1b[31m{'0' * 999}")
    log.out.print(rows)  # its rows then stand below each other
    assert "\x1b" not in printed()
