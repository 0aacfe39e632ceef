"""What a live page's server answers, and whom."""

import json
import os
import signal
import threading
import time

import pytest
from live import ADAMW, LOSSY, WITHIN_S, body, question, stopped

from bigdit.errors import UserError
from bigdit.live.answers import Answers
from bigdit.live.asked import Asked, step
from bigdit.live.gate import MOST_BYTES
from bigdit.rehearse import rehearse
from bigdit.search.finding.candidates import beside
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.verdict import process, safe_bytes
from bigdit.search.telling.ways import ways

# One plan with that of tests/commands/test_plan.py, which is kept, and one server.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]


@pytest.mark.parametrize(
    ("method", "path", "headers", "sent", "status"),
    [
        ("GET", "{path}", {}, b"", 200),
        ("GET", "/", {}, b"", 403),
        ("GET", "/another-token/", {}, b"", 403),
        ("GET", "/favicon.ico", {}, b"", 403),
        ("GET", "{path}../etc/passwd", {}, b"", 404),
        ("GET", "{path}", {"Host": "bigdit.example:80"}, b"", 421),  # a name that was bound anew to this machine
        ("GET", "{path}", {"Host": "127.0.0.1"}, b"", 421),
        ("GET", "{path}", {"Host": None}, b"", 400),
        ("GET", "{path}", {"Origin": "http://bigdit.example"}, b"", 403),
        ("POST", "{path}run", {"Origin": "null"}, b"{}", 403),
        ("POST", "{path}run", {"Origin": "https://{host}"}, b"{}", 403),
        ("POST", "{path}run", {"Origin": "http://{host}"}, b"{}", 400),  # asks for nothing
        ("POST", "/another-token/run", {}, b"{}", 403),
        ("POST", "{path}run", {"Content_Type": "text/plain"}, b"{}", 415),  # which a page elsewhere may send unasked
        ("POST", "{path}run", {"Content_Length": None, "Transfer_Encoding": "chunked"}, b"0\r\n\r\n", 411),
        ("POST", "{path}run", {}, b" " * (MOST_BYTES + 1), 413),
        ("POST", "{path}run", {}, b"not JSON", 400),
        ("POST", "{path}run", {}, json.dumps(body(ADAMW, 1.5, 0)).encode(), 400),
        ("POST", "{path}", {}, b"{}", 405),
        ("PUT", "{path}run", {}, b"", 405),
        ("OPTIONS", "{path}run", {}, b"", 405),
        ("OPTIONS", "*", {}, b"", 403),
    ],
)  # fmt: skip
def test_who_may_ask_what(live, method, path, headers, sent, status):
    given = {name: value and value.format(host=live.host) for name, value in headers.items()}
    found = live.ask(method, path.format(path=live.path), sent, **given)
    assert found.status == status, found
    assert "access-control-allow-origin" not in found.headers
    assert live.path.strip("/") not in found.text


def test_localhost_is_this_machine_too(live):
    host = live.host.replace("127.0.0.1", "localhost")
    assert live.ask("GET", live.path, Host=host, Origin=f"http://{host}").status == 200


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"strategy": "one process, AdamX"}, "strategy 'one process, AdamX' is not offered; did you mean one process"),
        ({"checkpointed_blocks": 13}, "13 recomputed blocks were asked for; 0 to 12 can be"),
        ({"card": "NVIDIA A40"}, "card 'NVIDIA A40' is not offered; known: NVIDIA GeForce RTX 3060"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_a_line(live, change, line):
    for kind in ("run", "rehearse"):
        (said,) = live.post(kind, body(ADAMW, 1, 0) | change).items()
        assert said[0] == "error"
        assert said[1].startswith(line)


@pytest.mark.parametrize(
    ("strategy", "size", "blocks", "verdict"),
    [
        (ADAMW, 192, 0, "DOES NOT FIT"),
        (ADAMW, 64, 0, "TIGHT"),
        (LOSSY, 16, 5, "FITS"),
        ("FSDP2 on 4, AdamW", 16, 0, "FITS"),
    ],
)
def test_verdicts_are_those_of_a_plan(live, offered, strategy, size, blocks, verdict):
    """FITS: it runs in the bytes that torch has at least; TIGHT: in those that it has at most. And of these as it was
    rehearsed."""
    asked = body(strategy, size, blocks)
    ran, found = live.post("run", asked), live.post("rehearse", asked)
    wanted = step({way.setting.title: way for way in offered[1]}, Asked(**asked))
    gpu, around = wanted.way.question.gpu, beside(wanted.way.question, wanted.strategy)
    card = live.answers.cards[gpu.name]
    lane = [1, 2, 4, 8, 16, 32, 64].index(wanted.strategy.world_size)
    band = Evidence().band
    least = card.run(wanted.request, safe_bytes(gpu, around, band), card=lane)
    most = card.run(wanted.request, gpu.usable_bytes - around.low_bytes, card=lane)
    expected = "FITS" if least.fits else "TIGHT" if most.ran else "DOES NOT FIT"
    assert ran["verdict"] == found["verdict"] == expected == verdict
    assert ran["peak_reserved_bytes"] == most.peak_reserved_bytes
    assert ran["ran_out"] is (verdict == "DOES NOT FIT")

    rehearsed = rehearse(wanted.request).sizes[0].ledger
    assert (found["at_peak"], found["phase"]) == (rehearsed.at_peak, rehearsed.deciding.phase)
    if most.ran:
        assert ran["process"] == found["process"] == process(most.peak_reserved_bytes, around, band).model_dump()
        assert found["peak_allocated_bytes"] == most.peak_allocated_bytes
    else:
        assert found["process"]["low_bytes"] >= gpu.usable_bytes


def test_without_emulated_cards_the_rehearsal_answers_as_the_plan_does(plan):
    chosen = plan.chosen
    with Answers(ways(plan, lambda count: question(gpus=count)), Evidence()) as answers:
        found = answers.rehearse(Asked(**body(ADAMW, chosen.strategy.micro_batch_size, 0)))
        with pytest.raises(UserError, match="--global-batch is 64, and 1 card × --micro-batch 3 come to"):
            answers.rehearse(Asked(**body(ADAMW, 3, 0)))
    assert (found.ran, found.verdict) == (False, plan.verdict)
    assert (found.at_peak, found.process, found.host_bytes) == (plan.ledger.at_peak, chosen.process, chosen.host_bytes)
    assert found.samples_per_second_per_card == chosen.samples_per_second_per_card
    assert found.seconds_per_step == chosen.step.seconds


def test_of_many_questions_the_newest_is_answered_and_a_killed_card_is_a_line(live):
    live.post("run", body(ADAMW, 2, 0))
    said = {}

    def begin(strategy, size):
        def ask():
            said[size] = live.post("run", body(strategy, size, 0))

        threads.append(threading.Thread(target=ask))
        threads[-1].start()

    threads = []
    fork = stopped(live, lambda: begin("FSDP2 on 8, AdamW", 4))
    begin(ADAMW, 8)
    time.sleep(0.5)  # it waits
    begin(ADAMW, 16)
    threads[1].join(WITHIN_S)
    assert said == {8: {"dropped": "a newer question was asked before this one had begun"}}
    os.kill(fork, signal.SIGKILL)
    for thread in threads:
        thread.join(WITHIN_S)
    assert said[4] == {"error": "dit-s-8 on an emulated card ended with status -9 and no result"}
    assert said[16]["verdict"] == "FITS"
