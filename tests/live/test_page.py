"""A live page in a real browser: what it asks, and how it shows what it is answered."""

import os
import re
import signal
from urllib.parse import parse_qs, urlsplit

import pytest
from browser import asked, browser, width
from live import ADAMW, USABLE_MIB, WITHIN_S, body, question, stopped
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from bigdit.config.strategy import MOST_MICRO_BATCH
from bigdit.memory import CATEGORIES
from bigdit.report.page import page as page_of
from bigdit.search.telling.ways import ways
from bigdit.units import gib

# One plan with that of tests/commands/test_plan.py, which is kept, and one server.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]


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
    assert facts["images/s a card"] == found["samples_per_second_per_card"]
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


def test_what_an_address_asks_for_and_cannot_be_had_is_said_with_what_runs_instead(page, live):
    page.get("about:blank")
    page.get(f"{live.url}#strategy=zzz&micro-batch=9999")
    answered(page)
    said = f"strategy “zzz” (shown: {ADAMW}); micro-batch “9999” (shown: {MOST_MICRO_BATCH})"
    assert at(page, "refused").text == f"The address asks for what is not here: {said}"
    changed(page, lambda: at(page, "blocks").send_keys(Keys.ARROW_RIGHT))
    assert not at(page, "refused").is_displayed()


def test_a_size_that_cannot_be_had_is_refused_by_name_and_what_is_shown_stays(page, live):
    before = state(page)
    exactly = at(page, "exactly")
    shown = exactly.get_attribute("value")
    for typed in ("1.5", "0", "-3", "99999"):
        exactly.send_keys(Keys.CONTROL, "a", Keys.NULL, typed, Keys.ENTER)
        said = f"Micro-batch “{typed}” is no whole number from 1 to {MOST_MICRO_BATCH} (shown: {shown})"
        assert at(page, "refused").text == said
        assert (exactly.get_attribute("value"), state(page)) == (shown, before)
    changed(page, lambda: exactly.send_keys(Keys.CONTROL, "a", Keys.NULL, "7", Keys.ENTER))
    assert not at(page, "refused").is_displayed()
    assert state(page)["micro-batch"] == "7"


def test_a_page_offers_the_sizes_that_can_be_asked_for(plan, offered):
    """Any, or with a global batch those that share it out."""
    some = page_of(plan, live=ways(plan, lambda count: question(gpus=count)))
    assert "The micro-batches on the slider and any number of blocks may be asked for" in some
    assert 'id="whatif-exactly"' not in some
    small, offers = offered
    every = page_of(small, live=offers)
    assert "Any micro-batch and any number of blocks may be asked for" in every
    assert 'id="whatif-exactly"' in every


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
