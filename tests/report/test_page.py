"""The page of a plan and its images: one file, readable by everyone and on paper; and its folder."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import plans
import pytest
from colours import VISIONS, lab
from commands import ROOT
from PIL import Image

from bigdit.memory import CATEGORIES
from bigdit.report.figures import COLOURS, curves_figure, save
from bigdit.report.html import DARK
from bigdit.report.page import page
from bigdit.units import gib

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]  # only the recorded run takes long

VOID = {"meta", "br", "img", "input", "hr", "link", "path", "use"}


class Outline(HTMLParser):
    """Elements with their attributes, in order, and the text within open ones."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts, self.scripts = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        if not {"style", "svg", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def made():
    return plans.made_plan()


@pytest.fixture(scope="module")
def shown(made):
    return page(made, Path("plans/x"))


def test_it_asks_for_nothing_next_to_itself(shown):
    outline = Outline(shown)
    assert outline.open == []
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in outline.elements}
    for tag, attributes in outline.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert value.startswith("#"), (tag, value)
    assert not re.search(r"url\((?!#)|@import", shown)
    script = re.search(r"<script type=.module.>(.*?)</script>", shown, re.DOTALL)[1]
    assert not re.search(r"eval|Function\(|fetch|XMLHttp|WebSocket|import|innerHTML|document\.write", script)
    assert set(re.findall(r"https?://[^\s\"<]+", shown)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert len(shown) < 1_000_000


def test_it_is_for_those_who_cannot_see_it_too(shown):
    elements = Outline(shown).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert elements[0] == ("html", {"lang": "en"})
    images = [attributes for tag, attributes in elements if tag == "svg"]
    assert len(images) == 3
    for attributes in images:
        assert attributes["role"] == "img"
        assert all(name in ids for name in attributes["aria-labelledby"].split())
    assert all("scope" in attributes for tag, attributes in elements if tag == "th")
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    regions = [attributes for _, attributes in elements if attributes.get("class") == "wide"]
    assert all(attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in regions)


def test_on_a_narrow_screen_nothing_is_lost(shown):
    """At 400 pixels tables with many columns become lists whose lines name their column. Wide content scrolls, and
    the GPU's label stands on the side of its line that has room."""
    narrow = shown[shown.index("@media (max-width: 560px)") : shown.index("@media print")]
    assert ".stacks [data-head]::before { content: attr(data-head)" in narrow
    tables = re.findall(r"<table class=.(?:choices )?stacks.>(.*?)</table>", shown, re.DOTALL)
    assert len(tables) == 2
    for table in tables:
        heads = [re.sub(r"\s*◂", "", head) for head in re.findall(r"<th scope=.col.[^>]*>(.*?)</th>", table)]
        rows = re.findall(r"<tr.*?</tr>", table.split("</thead>")[1], re.DOTALL)
        assert rows
        for row in rows:
            assert re.findall(r"data-head=.([^\"]*)", row) == heads
    assert shown.count("<table") == 3
    assert re.search(r"white-space: pre-wrap", narrow)
    for wide, count in (("svg", 3), ("table", 3)):
        assert len(re.findall(rf'<div class="wide"[^>]*>\s*<{wide}', shown)) == shown.count(f"<{wide}") == count


@pytest.mark.parametrize("percent", range(0, 101, 5))
def test_the_gpus_mark_has_room_on_a_narrow_screen(percent):
    """400 pixels less the margins of page and section. The label takes 16 letters of 0.85 rem."""
    template = (ROOT / "bigdit/report/templates/plan.html").read_text()
    after = percent < int(re.search(r"gpu_line < (\d+)", template)[1])
    width, mark = 400 - 2 * (10 + 14 + 1), len("usable 44.35 GiB") * 0.85 * 16 * 0.6
    line = width * percent / 100
    assert line + 8 + mark <= width if after else line - 6 - mark >= 0


def test_references_within_images_are_met(shown):
    ids = {attributes["id"] for _, attributes in Outline(shown).elements if "id" in attributes}
    assert set(re.findall(r"(?:href=\"|url\()#([\w.-]+)", shown)) <= ids


def test_images_take_the_pages_colours(shown):
    images = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    for image in images:
        for colour in ("#000000", "#ffffff", *COLOURS.values()):
            assert colour.lower() not in image.lower()
        assert "<style" not in image
    styles = re.search(r"<style>(.*?)</style>", shown, re.DOTALL)[1]
    defined = set(re.findall(r"(--[\w-]+):", styles))
    assert set(re.findall(r"var\((--[\w-]+)\)", shown)) <= defined | {"--colour"}
    assert "prefers-color-scheme: dark" in styles
    assert "@media print" in styles


def test_the_page_has_all_that_was_found(made, shown):
    text = Outline(shown).text
    assert "FITS needs" in text
    for phase in made.ledger.phases:
        assert f"{phase.phase}" in text
        assert gib(phase.peak_bytes) in text
        for nbytes in phase.at_peak.values():
            assert gib(nbytes) in text
    for choice in made.front:
        assert choice.title in text
        assert choice.reason in text
    for each in made.rejected:
        assert each.reason in text
    for step in made.waterfall:
        assert step.change in text
        assert f"{gib(step.process_bytes)} {step.verdict.lower()}" in text
    for limit in made.buckets:
        assert f"{limit.height} × {limit.width} {limit.none} {limit.recommended} {limit.full}" in text
    for name, version in made.versions.items():
        assert f"{name} {version}" in text
    assert made.catalogue in text
    assert made.calibration in text
    assert all(notice in text for notice in made.notices)
    assert "bigdit train --config plans/x/run.yaml" in text


def test_bars_are_as_long_as_their_bytes(made, shown):
    process = made.chosen.process.high_bytes
    bars = re.findall(r'<div class="bar".*?</div>', shown, re.DOTALL)
    lengths = [sum(float(part) for part in re.findall(r"width: ([\d.]+)%", bar)) for bar in bars]
    usable, highest = made.request.gpu.usable_bytes, made.ledger.peak_allocated_bytes
    wanted = [100 * process / usable, *(100 * phase.peak_bytes / highest for phase in made.ledger.phases)]
    assert lengths == pytest.approx(wanted, abs=0.02)


def test_what_does_not_fit_leads_with_what_would():
    plan = plans.unfitting_plan()
    text = Outline(page(plan, Path("plans/x"))).text
    assert "DOES NOT FIT needs" in text
    assert text.index("What would fit") < text.index("Nearest to fitting")
    assert "bigdit train" not in text


def test_a_plan_with_little_to_show_has_a_page(made):
    bare = {"front": (made.chosen,), "rejected": (), "buckets": (), "curves": {}, "waterfall": (), "notices": ()}
    plan = made.model_copy(update=bare | {"dataset": None, "run": None, "ran": ()})
    outline = Outline(page(plan))
    assert outline.open == []
    assert outline.scripts == []
    assert "To run it" not in outline.text


def test_names_are_text_and_not_markup(made):
    spec = made.request.model.spec.model_copy(update={"name": "<script>alert(1)</script>&"})
    model = made.request.model.model_copy(update={"spec": spec})
    curves = {f"<i>&{label}": curve for label, curve in made.curves.items()}
    title = "</script><script>alert(1)</script><!--<script>"
    chosen = made.chosen.model_copy(update={"option": title, "title": "<u>", "reason": "a < b & c"})
    request = made.request.model_copy(update={"model": model})
    hostile = {"request": request, "chosen": chosen, "front": (chosen, *made.front[1:]), "curves": curves}
    hostile |= {"ran": (chosen,)}
    outline = Outline(page(made.model_copy(update=hostile), Path("<out>")))
    assert not {"script", "u", "i"} & {tag for tag, attributes in outline.elements if not attributes}
    assert "<script>alert(1)</script>& on one NVIDIA A40" in outline.text
    data = next(at for at, (_, attributes) in enumerate(outline.elements) if attributes.get("id") == "whatif-data")
    assert json.loads(outline.scripts[0])["settings"][0]["strategy"] == title
    assert outline.elements[data + 1] == ("script", {"type": "module"})


@pytest.mark.parametrize("vision", VISIONS)
def test_in_the_dark_too_no_colour_is_taken_for_another(vision):
    assert set(DARK) == set(CATEGORIES)
    seen = {name: lab(colour, np.array(VISIONS[vision])) for name, colour in DARK.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


def test_in_the_dark_colours_stand_out_from_the_page():
    paper = lab("#161b22", np.eye(3))
    for name, colour in DARK.items():
        assert lab(colour, np.eye(3))[0] - paper[0] > 20, name


def test_curves_are_drawn_and_the_gpu_is_among_them(made, tmp_path):
    save(curves_figure(made), tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[:2] == (600, 1200)
    for colour in (COLOURS["gradient"], COLOURS["parameter"], COLOURS["optimizer state"]):
        rgb = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
        assert (pixels == rgb).all(axis=-1).sum() > 100, colour
    black = (pixels < 40).all(axis=-1).sum(axis=1)
    assert (black > 500).sum() >= 2  # the axis below, and the dashed line of the GPU
