"""A plan's page whose changes run: what the server answers, whom, and what a browser makes of it."""

import json
import os
import re
import signal
import threading
import time
from urllib.parse import parse_qs, urlsplit

import pytest
from browser import asked, browser, width
from live import served
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from bigdit.errors import UserError
from bigdit.live.answers import Answers
from bigdit.live.asked import Asked, step
from bigdit.live.gate import MOST_BYTES
from bigdit.memory import CATEGORIES
from bigdit.rehearse import rehearse
from bigdit.report.page import page as page_of
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.candidates import beside
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.verdict import process, safe_bytes
from bigdit.search.telling.ways import ways
from bigdit.units import gib

# One plan with that of tests/commands/test_plan.py, which is kept.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]

ADAMW, LOSSY = "one process, AdamW", "one process, CAME, bf16 without masters"
WITHIN_S = 120
USABLE_MIB = 1340


def question(**changes):
    return question_for("dit-s-8", "rtx-3060", images="10k", global_batch=64, device="rehearsed", **changes)


@pytest.fixture(scope="module")
def plan():
    return make_plan(question())


@pytest.fixture(scope="module")
def offered(plan):
    """The plan's ways on emulated cards that are too small for some of them, at any micro-batch."""
    changed = {"gpu": plan.question.gpu.model_copy(update={"usable_mib": USABLE_MIB}), "device": "emulated"}
    changed["global_batch_size"] = None
    small = plan.model_copy(update={"question": plan.question.model_copy(update=changed)})
    return small, ways(small, lambda count: question(gpus=count).model_copy(update=changed))


@pytest.fixture(scope="module")
def live(offered, tmp_path_factory):
    """Its server, for which nothing is kept that ran before."""
    plan, offers = offered
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(page_of(plan, live=offers), Answers(offers, Evidence())) as made:
            made.answers.warm(Asked(**body(ADAMW, 1, 0)))
            yield made


@pytest.fixture(scope="module")
def chromium():
    with browser() as made:
        yield made


@pytest.fixture
def page(chromium, live):
    """The page when its first question is answered."""
    width(chromium, 1200)
    chromium.get("about:blank")
    chromium.get(live.url)
    answered(chromium)
    return chromium


def body(strategy, size, blocks):
    return {
        "strategy": strategy,
        "card": "NVIDIA GeForce RTX 3060",
        "micro_batch_size": size,
        "checkpointed_blocks": blocks,
    }


def stopped(live, ask):
    """The process that a question begins, of a number of cards that was not asked for before; it does nothing from then
    on."""
    (card,) = live.answers.cards.values()
    before = {*card.lanes.forks}
    ask()
    until = time.monotonic() + WITHIN_S
    while not (new := {*card.lanes.forks} - before):
        assert time.monotonic() < until
        time.sleep(0.005)
    (fork,) = new
    os.kill(fork, signal.SIGSTOP)
    return fork


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
        (ADAMW, 64, 0, "DOES NOT FIT"),
        (ADAMW, 48, 0, "TIGHT"),
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
    assert found.images_per_second_per_card == chosen.images_per_second_per_card
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


def at(page, name):
    return page.find_element(By.ID, f"whatif-{name}")


def state(page):
    return {key: value for key, (value,) in parse_qs(urlsplit(page.current_url).fragment).items()}


def texts(page, selector):
    return [each.text for each in page.find_elements(By.CSS_SELECTOR, selector)]


def answered(page):
    """Wait until what is asked has run, and was rehearsed."""
    WebDriverWait(page, WITHIN_S, 0.05).until(lambda page: "as rehearsed" in at(page, "how").text)


def changed(page, change):
    """What the page says before the change is answered, which is shown when this returns."""
    change()
    now = page.execute_script("return document.getElementById('whatif-verdict').innerText")
    answered(page)
    return now.strip()


def shows(page, live, asked):
    """Whether every number on the page is the one of the answer to this question."""
    found, ran = live.post("rehearse", asked), live.post("run", asked)
    low, high = (found["process"][end] for end in ("low_bytes", "high_bytes"))
    assert at(page, "verdict").find_element(By.TAG_NAME, "strong").text == found["verdict"]
    said = at(page, "verdict").find_element(By.TAG_NAME, "span").text
    wants = re.fullmatch(r"wants (.+) of (.+) usable, (.+ (?:left|too much)); ran on an emulated (.+), \d+\.\d s", said)
    left = USABLE_MIB * 2**20 - high
    rest = f"{gib(left)} left" if left >= 0 else f"{gib(-left)} too much"
    numbers = wants[1].removesuffix(" GiB").split("–")
    assert [f"{number} GiB" for number in numbers] == [gib(low), gib(high)]
    assert wants.groups()[1:] == (gib(USABLE_MIB * 2**20), rest, asked["card"])
    assert re.fullmatch(r"By category, on the host and in time: as rehearsed, \d+\.\d s", at(page, "how").text)
    rows = [f"{name} {gib(found['at_peak'][name])}" for name in CATEGORIES if found["at_peak"].get(name)]
    assert [row[2:] for row in texts(page, "#whatif-parts li")][: len(rows)] == rows
    facts = dict(zip(texts(page, "#whatif-facts dt"), texts(page, "#whatif-facts dd:nth-of-type(1)"), strict=True))
    assert facts["reserved by torch"] == gib(found["peak_reserved_bytes"])
    assert (facts["decides"], facts["on the host"]) == (found["phase"], gib(found["host_bytes"]))
    assert facts["images/s a card"] == found["images_per_second_per_card"]
    assert facts["a step"] == found["seconds_per_step"]
    assert ran["ran_out"] or ran["peak_reserved_bytes"] == found["peak_reserved_bytes"]


def test_sliders_and_choices_run_what_they_ask_for(page, live):
    shows(page, live, body(ADAMW, 64, 0))
    now = changed(page, lambda: at(page, "micro-batch").send_keys(Keys.ARROW_LEFT))
    assert now == "runs…"
    shows(page, live, body(ADAMW, 60, 0))
    exactly = at(page, "exactly")
    assert exactly.get_attribute("value") == "60"
    changed(page, lambda: exactly.send_keys(Keys.CONTROL, "a", Keys.NULL, "33", Keys.ENTER))
    changed(page, lambda: at(page, "blocks").send_keys(*[Keys.ARROW_RIGHT] * 5))
    assert [at(page, f"{name}-said").text for name in ("micro-batch", "blocks")] == ["33", "5"]
    shows(page, live, body(ADAMW, 33, 5))
    changed(page, lambda: Select(at(page, "cards")).select_by_visible_text("4"))
    title = state(page)["strategy"]
    assert title.endswith(" on 4, AdamW")
    shows(page, live, body(title, 33, 5))


def test_the_address_keeps_what_is_asked(page, live):
    changed(page, lambda: Select(at(page, "optimizer")).select_by_visible_text("CAME"))
    changed(page, lambda: at(page, "blocks").send_keys(Keys.END))
    before, address = state(page), page.current_url
    assert (before["blocks"], address.split("#")[0]) == ("12", live.url)
    page.refresh()
    answered(page)
    assert (state(page), page.current_url) == (before, address)
    shows(page, live, body("one process, CAME", 64, 12))


def test_a_card_that_is_killed_is_said_and_the_next_question_runs(page, live):
    fork = stopped(live, lambda: Select(at(page, "cards")).select_by_visible_text("16"))
    os.kill(fork, signal.SIGKILL)
    WebDriverWait(page, WITHIN_S, 0.05).until(lambda page: at(page, "how").text)
    assert at(page, "verdict").text == "no answer"
    assert at(page, "how").text == "no answer: dit-s-8 on an emulated card ended with status -9 and no result"
    changed(page, lambda: Select(at(page, "cards")).select_by_visible_text("1"))
    shows(page, live, body(ADAMW, 64, 0))


@pytest.mark.parametrize("pixels", [400, 1200])
def test_it_is_as_wide_as_the_screen(page, pixels):
    width(page, pixels)
    assert page.execute_script("return document.documentElement.scrollWidth") <= pixels
    inside = [each for each in page.find_elements(By.CSS_SELECTOR, "#whatif *") if each.is_displayed()]
    assert len(inside) > 40
    assert all(each.rect["x"] + each.rect["width"] <= pixels for each in inside)


def test_it_asks_its_own_server_alone_and_complains_of_nothing(page, live):
    assert page.get_log("browser") == []
    wanted = [live.url, f"{live.url}run", f"{live.url}rehearse"]
    assert set(wanted) == {url for url in asked(page) if not url.startswith(("about:", "data:"))}
    page.execute_async_script("fetch('http://127.0.0.1:9/').catch(() => 0).finally(arguments[0])")
    assert any("Content Security Policy" in entry["message"] for entry in page.get_log("browser"))
