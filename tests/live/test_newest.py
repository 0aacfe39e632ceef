"""One question at a time, and of those that wait the newest."""

import threading

import pytest

from bigdit.live.newest import DroppedError, Newest

WITHIN_S = 30


def test_the_newest_of_those_that_wait_is_answered():
    begun, go_on = threading.Event(), threading.Event()
    answered = []

    def answer(question):
        begun.set()
        go_on.wait(WITHIN_S)
        answered.append(question)
        return question * 10

    newest = Newest(answer)
    first = newest.ask(1)
    assert begun.wait(WITHIN_S)
    second, third, fourth = (newest.ask(question) for question in (2, 3, 4))
    for dropped in (second, third):  # at once, while the first is being answered
        with pytest.raises(DroppedError, match="a newer question was asked before this one had begun"):
            dropped.result(WITHIN_S)
    assert not first.done()
    go_on.set()
    assert [first.result(WITHIN_S), fourth.result(WITHIN_S)] == [10, 40]
    assert answered == [1, 4]


def test_who_has_gone_is_not_answered_and_what_was_raised_is_the_answer():
    begun, go_on = threading.Event(), threading.Event()
    answered = []

    def answer(question):
        begun.set()
        go_on.wait(WITHIN_S)
        answered.append(question)
        raise ValueError(f"no {question}")

    newest = Newest(answer)
    first = newest.ask(1)
    assert begun.wait(WITHIN_S)
    gone = newest.ask(2)
    assert gone.cancel()
    newest_one = newest.ask(3)
    go_on.set()
    for question, future in ((1, first), (3, newest_one)):
        with pytest.raises(ValueError, match=f"no {question}"):
            future.result(WITHIN_S)
    assert answered == [1, 3]
