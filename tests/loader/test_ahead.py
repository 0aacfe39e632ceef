"""Steps are read ahead in order, and as many as requested."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import DIGITS, SINGLE
from tiny_models import SANA

from bigdit.config.check import check
from bigdit.config.stages import load_run
from bigdit.loader.batch import read_ahead


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_steps_come_in_order_and_so_many_ahead_are_asked_for(ahead: int) -> None:
    asked: list[int] = []

    def read(step: int) -> int:
        asked.append(step)
        return step * step

    with ThreadPoolExecutor(1) as reader:
        found = []
        for square in read_ahead(read, range(2, 8), ahead, reader):
            reader.submit(int).result()  # the thread has done its work
            found.append((square, len(asked)))
    assert found == [(step * step, min(step - 1 + ahead, 6)) for step in range(2, 8)]


def test_an_error_of_the_reader_is_the_caller_s() -> None:
    def read(step: int) -> int:
        raise OSError(f"step {step}")

    with ThreadPoolExecutor(1) as reader, pytest.raises(OSError, match="step 0"):
        next(read_ahead(read, itertools.count(), 2, reader))


def test_the_run_s_config_says_how_far_to_read_ahead() -> None:
    run = load_run(DIGITS, ["strategy.read_ahead_steps=5", *SINGLE])
    assert run.strategy.read_ahead_steps == 5
    with pytest.raises(Exception, match=r"strategy\.read_ahead_steps"):
        load_run(DIGITS, ["strategy.read_ahead_steps=-1"])
    check(run, SANA.model_copy(update={"kwargs": {}}))
