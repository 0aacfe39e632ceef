"""The page's sliders and choices in a real browser, beside the plan's own JSON."""

import json
import re
from urllib.parse import parse_qs, urlencode, urlsplit

import plans
import pytest
from browser import asked, browser, width
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from bigdit import catalog
from bigdit.memory import CATEGORIES
from bigdit.report.page import write_plan
from bigdit.search.plan import process, verdict_of
from bigdit.strategy import EmaSpec, OptimizerSpec
from bigdit.units import gib

# It shares a plan with tests/report/test_plan.py, which is recorded once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]

ADAMW = "single GPU, AdamW"
RAN = ((2, 0), (2, 20), (4, 0), (8, 12), (8, 20), (16, 20), (24, 20))
"""Micro-batches with blocks. As after a search, not every size has every number of blocks."""
OTHERS = {
    "single GPU, 8-bit AdamW": {"optimizer": OptimizerSpec(name="adamw_8bit")},
    "single GPU, CAME": {"optimizer": OptimizerSpec(name="came")},
    "single GPU, CAME, EMA on the GPU": {"optimizer": OptimizerSpec(name="came"), "ema": EmaSpec(device="gpu")},
}
SMALLER, LARGER = catalog.gpu("rtx-3090-ti"), catalog.gpu("rtx-a6000")


def at_sizes(plan, size, blocks):
    """The recommended point as it was recorded, and made-up others: more bytes with each image and each block kept."""
    recommended = plan.chosen
    if (size, blocks) == (recommended.micro_batch_size, recommended.blocks):
        return recommended
    share = 0.5 + size * (1 - blocks / 40) / 16
    reserved = int(recommended.peak_reserved_bytes * share)
    taken = process(reserved, recommended.non_torch, plan.margin)
    sizes = {"micro_batch_size": size, "checkpointed_blocks": blocks}
    changes = {
        "source": "ran",
        "strategy": recommended.strategy.model_copy(update=sizes),
        "peak_allocated_bytes": int(recommended.peak_allocated_bytes * share),
        "peak_reserved_bytes": reserved,
        "process": taken,
        "verdict": verdict_of(taken, plan.request.gpu.usable_bytes),
    }
    return recommended.model_copy(update=changes)


def with_points(plan):
    first = [at_sizes(plan, *sizes) for sizes in RAN]
    others = [
        each.model_copy(update={"option": title, "strategy": each.strategy.model_copy(update=changes)})
        for title, changes in OTHERS.items()
        for each in first
    ]
    kernels = plan.same_kernels | {gpu.title: gpu.usable_bytes for gpu in (SMALLER, LARGER)}
    return plan.model_copy(update={"ran": (*first, *others), "same_kernels": kernels})


@pytest.fixture(scope="module")
def plan():
    return with_points(plans.made_plan())


@pytest.fixture(scope="module")
def folder(plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sliders") / "plan"
    write_plan(plan, folder)
    return folder


@pytest.fixture(scope="module")
def document(folder):
    return json.loads((folder / "plan.json").read_text())


@pytest.fixture(scope="module")
def chromium():
    with browser() as made:
        yield made


@pytest.fixture
def page(chromium, folder):
    """The page as it is first shown."""
    width(chromium, 1200)
    chromium.get("about:blank")
    chromium.get((folder / "report.html").as_uri())
    return chromium


def at(page, name):
    return page.find_element(By.ID, f"whatif-{name}")


def texts(page, selector):
    return [each.text for each in page.find_elements(By.CSS_SELECTOR, selector)]


def state(page):
    return {key: value for key, (value,) in parse_qs(urlsplit(page.current_url).fragment).items()}


SIZES = ("micro_batch_size", "checkpointed_blocks")


def ran_of(document, title):
    return [each for each in document["ran"] if each["option"] == title]


def point(document, title, size, blocks):
    """What ran by the JSON, with its peak phase and its record, and the plan's GPU."""
    wanted = (int(size), int(blocks))
    (ran,) = [each for each in ran_of(document, title) if tuple(each["strategy"][key] for key in SIZES) == wanted]
    recorded = max(document["ledger"]["phases"], key=lambda phase: phase["peak_bytes"])["at_peak"]
    at_peak = recorded if ran["strategy"] == document["chosen"]["strategy"] else {}
    usable = next(iter(document["same_kernels"].values()))
    found = ran | {"phase": max(ran["phases"], key=ran["phases"].get), "at_peak": at_peak}
    return found, {"usable_bytes": usable, "non_torch": ran["non_torch"]}


def shown(page, document):
    """The point in the address."""
    asked = state(page)
    return point(document, asked["strategy"], asked["micro-batch"], asked["blocks"])


def gibs(low, high):
    return gib(high) if gib(low) == gib(high) else f"{gib(low).removesuffix(' GiB')}–{gib(high)}"


def shows(page, found, room, how="ran"):
    """Whether every number on the page belongs to this point on this GPU."""
    low, high = (found["process"][end] for end in ("low_bytes", "high_bytes"))
    left = room["usable_bytes"] - high
    assert at(page, "verdict").find_element(By.TAG_NAME, "strong").text == found["verdict"]
    rest = f"{gib(left)} left" if left >= 0 else f"{gib(-left)} too much"
    needs = f"needs {gibs(low, high)} of {gib(room['usable_bytes'])} usable, {rest}"
    assert at(page, "verdict").find_element(By.TAG_NAME, "span").text == f"{needs}; {how} on an emulated NVIDIA A40"

    allocated, reserved = found["peak_allocated_bytes"], found["peak_reserved_bytes"]
    parts = {name: found["at_peak"].get(name, 0) for name in CATEGORIES} if found["at_peak"] else {}
    parts = (parts or {"allocated": allocated}) | {"idle in the allocator": max(reserved - allocated, 0)}
    parts |= {"safety margin": high - room["non_torch"]["high_bytes"] - reserved}
    parts |= {"CUDA context, NCCL": room["non_torch"]["high_bytes"]}
    rows = [f"{name} {gib(nbytes)}" for name, nbytes in parts.items() if nbytes]
    assert [row[2:] for row in texts(page, "#whatif-parts li")] == rows
    facts = dict(zip(texts(page, "#whatif-facts dt"), texts(page, "#whatif-facts dd:nth-of-type(1)"), strict=True))
    assert facts["reserved by torch"] == gib(reserved)
    assert facts["peak phase"] == found["phase"]
    assert facts["CPU memory"] == gib(found["host_bytes"])

    longest = max(room["usable_bytes"], high)
    bar, line = at(page, "bar").rect, at(page, "line").rect
    assert line["x"] - bar["x"] == pytest.approx(bar["width"] * room["usable_bytes"] / longest, abs=2)
    stacked = sum(each.rect["width"] for each in page.find_elements(By.CSS_SELECTOR, "#whatif-bar > span"))
    assert stacked == pytest.approx(bar["width"] * sum(parts.values()) / longest, abs=2)


def test_it_begins_with_what_is_recommended(page, plan, document):
    found, room = point(document, ADAMW, 8, 12)
    assert found["process"] == plan.chosen.process.model_dump()
    assert found["at_peak"] == plan.ledger.at_peak
    assert found["verdict"] == plan.verdict
    shows(page, found, room)
    assert state(page) == {}
    assert not at(page, "instead").is_displayed()


def test_sliders_move_over_all_that_ran_by_the_keyboard(page, document):
    """The other slider moves to the nearest point that ran, and the page says so."""
    points = [each["strategy"] for each in ran_of(document, ADAMW)]
    keys = {"micro-batch": "micro_batch_size", "blocks": "checkpointed_blocks"}
    now = {"blocks": 12}
    for moved, other in (("micro-batch", "blocks"), ("blocks", "micro-batch")):
        slider = at(page, moved)
        slider.send_keys(Keys.HOME)
        for value in sorted({each[keys[moved]] for each in points}):
            ran = [each[keys[other]] for each in points if each[keys[moved]] == value]
            wanted, nearest = now[other], min(ran, key=lambda each: abs(each - now[other]))
            assert at(page, f"{moved}-value").text == slider.get_attribute("aria-valuetext") == str(value)
            assert at(page, f"{other}-value").text == str(nearest)
            instead = f"These did not run: {other} “{wanted}” (shown: {nearest})"
            assert at(page, "instead").text == (instead if wanted != nearest else "")
            now = {moved: value, other: nearest}
            shows(page, *point(document, ADAMW, now["micro-batch"], now["blocks"]))
            slider.send_keys(Keys.ARROW_RIGHT)
    assert state(page) == {key: str(value) for key, value in now.items()} | {"strategy": ADAMW, "gpu": "NVIDIA A40"}
    assert {each["verdict"] for each in ran_of(document, ADAMW)} == {"FITS", "DOES NOT FIT"}


def test_all_is_reached_with_the_tabulator(page):
    names = {}
    for _ in range(4):
        page.switch_to.active_element.send_keys(Keys.TAB)
        focused = page.switch_to.active_element
        assert focused.value_of_css_property("outline-style") == "solid"
        names[focused.get_attribute("id").removeprefix("whatif-")] = focused.accessible_name
    assert names == {
        "optimizer": "Optimizer",
        "gpu": "GPU",
        "micro-batch": "Micro-batch",
        "blocks": "Recomputed blocks",
    }


def test_a_choice_leaves_only_what_ran_with_it(page, document):
    optimizer = Select(at(page, "optimizer"))
    assert [each.text for each in optimizer.options] == ["AdamW", "8-bit AdamW", "CAME"]
    assert not at(page, "ema").is_enabled()
    optimizer.select_by_visible_text("CAME")
    assert state(page)["strategy"] == "single GPU, CAME"
    Select(at(page, "ema")).select_by_visible_text("in fp32 on the GPU")
    assert state(page)["strategy"] == "single GPU, CAME, EMA on the GPU"
    shows(page, *shown(page, document))
    optimizer.select_by_visible_text("8-bit AdamW")
    assert state(page)["strategy"] == "single GPU, 8-bit AdamW"
    assert not at(page, "ema").is_enabled()
    shows(page, *shown(page, document))


def test_another_gpu_is_judged_by_its_own_bytes(page, document):
    found, own = point(document, ADAMW, 8, 12)
    verdicts = {}
    for gpu in (SMALLER, LARGER):
        Select(at(page, "gpu")).select_by_visible_text(gpu.title)
        fits = found["process"]["high_bytes"] <= gpu.usable_bytes
        verdicts[gpu.name] = "FITS" if fits else "DOES NOT FIT"
        changed = found | {"verdict": verdicts[gpu.name]}
        shows(page, changed, own | {"usable_bytes": gpu.usable_bytes}, "by the bytes that it took")
    assert verdicts == {SMALLER.name: "DOES NOT FIT", LARGER.name: "FITS"}


def test_the_address_keeps_what_is_asked(page, document):
    Select(at(page, "optimizer")).select_by_visible_text("8-bit AdamW")
    at(page, "blocks").send_keys(Keys.END)
    before, address = state(page), page.current_url
    assert before["blocks"] == "20"
    page.refresh()
    assert (state(page), page.current_url) == (before, address)
    shows(page, *shown(page, document))
    assert at(page, "optimizer").get_attribute("value") == "8-bit AdamW"
    assert at(page, "blocks-value").text == "20"


def test_an_address_that_means_nothing_shows_what_is_recommended(page, folder, document):
    nonsense = {"strategy": "</script><b>", "micro-batch": "many", "blocks": "few", "gpu": "abacus"}
    page.get(f"{(folder / 'report.html').as_uri()}#{urlencode(nonsense)}")
    shows(page, *point(document, ADAMW, 8, 12))
    instead = at(page, "instead").text
    assert instead.startswith(f"These did not run: strategy “</script><b>” (shown: {ADAMW})")
    assert "micro-batch “many” (shown: 8); blocks “few” (shown: 12)" in instead
    assert "gpu “abacus” (shown: NVIDIA A40)" in instead
    Select(at(page, "gpu")).select_by_visible_text(LARGER.title)
    assert not at(page, "instead").is_displayed()


def test_an_address_that_asks_for_too_much_says_what_is_shown_instead(page, folder, document):
    page.get(f"{(folder / 'report.html').as_uri()}#{urlencode({'micro-batch': '9999', 'blocks': '-1e9', 'size': '3'})}")
    shows(page, *point(document, ADAMW, 24, 20))
    printed = "micro-batch “9999” (shown: 24); blocks “-1e9” (shown: 20); size “3” (no such choice)"
    assert at(page, "instead").text == f"These did not run: {printed}"


@pytest.mark.parametrize("pixels", [400, 1200])
def test_it_is_as_wide_as_the_screen(page, pixels):
    width(page, pixels)
    at(page, "blocks").send_keys(Keys.ARROW_RIGHT)
    assert page.execute_script("return document.documentElement.scrollWidth") <= pixels
    inside = page.find_elements(By.CSS_SELECTOR, "#whatif *")
    assert len(inside) > 40
    assert all(each.rect["x"] + each.rect["width"] <= pixels for each in inside if each.is_displayed())


def test_tables_that_are_lists_on_a_narrow_screen_are_as_wide_as_it(page):
    """With their captions. A cell's text is one piece, at its end."""
    width(page, 400)
    captions = page.find_elements(By.CSS_SELECTOR, ".stacks caption")
    assert captions
    for caption in captions:
        table = caption.find_element(By.XPATH, "..")
        assert caption.rect["width"] == table.rect["width"] > 300
    pieces = "return [...document.querySelectorAll('.stacks th, .stacks td')].map(each => each.childNodes.length)"
    assert set(page.execute_script(pieces)) == {1}


def test_bars_are_reported_apart_without_colours(page):
    letters = texts(page, "#whatif-bar i")
    assert len(letters) >= 3
    legend = [row[0] for row in texts(page, "#whatif-parts li")]
    assert set(letters) <= set(legend)
    assert legend == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(legend)])


def test_it_asks_for_nothing_and_complains_of_nothing(page, folder):
    at(page, "micro-batch").send_keys(Keys.ARROW_RIGHT)
    assert page.get_log("browser") == []
    own = (folder / "report.html").as_uri()
    assert {address for address in asked(page) if not address.startswith("about:")} == {own}
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_without_scripts_all_else_is_there(chromium, folder):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get((folder / "report.html").as_uri())
        assert not chromium.find_element(By.ID, "whatif").is_displayed()
        text = chromium.find_element(By.TAG_NAME, "main").text
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "Sliders that show other settings need JavaScript." in text
    assert re.search(r"Memory by phase", text)


def test_another_number_of_gpus_is_another_plans(chromium, plan, tmp_path):
    """Its own strategies, on its own machine."""
    other = plans.sharded_plan(8)
    own = other.chosen.model_copy(update={"option": "ZeRO-2 on 8, AdamW"})
    request = other.request.model_copy(update={"host_memory_bytes": 2 * plan.request.host_memory_bytes})
    other = other.model_copy(update={"chosen": own, "ran": (own,), "request": request})
    write_plan(plan, tmp_path / "plan", [other])
    written = tmp_path / "plan" / "report.html"
    chromium.get(written.as_uri())
    said = "All settings and sizes here ran for plans of 1, 8 GPUs;"
    # On a busy machine the driver's source of a page that was just loaded is empty for a moment.
    WebDriverWait(chromium, 30).until(lambda page: said in page.page_source)
    gpus = Select(at(chromium, "gpus"))
    assert [each.text for each in gpus.options] == ["1", "8"]
    assert gpus.first_selected_option.text == "1"
    gpus.select_by_visible_text("8")
    asked = state(chromium)
    assert asked["strategy"] == own.option
    shows(chromium, *shown(chromium, json.loads(other.model_dump_json())))
    assert f"of {gib(request.host_memory_bytes)} per machine" in texts(chromium, "#whatif-facts dd")
    assert json.loads((written.parent / "plan.json").read_text()) == json.loads(plan.model_dump_json()) | {"fits": True}
    assert written.stat().st_size < 1_000_000
