"""docs/quickstarts.md has the tables of benchmarks/quickstarts.json, and leaves out no model."""

import re

import quickstarts

FOUND, PAGE = quickstarts.answers(), quickstarts.PAGE.read_text()


def test_every_plan_has_a_row():
    assert set(FOUND) <= {*quickstarts.asked()}
    assert {model for model, _, _ in FOUND} == {*quickstarts.MODELS}
    assert {*re.findall("<!-- fits (.+?) -->", PAGE)} == {*quickstarts.MODELS}
    assert quickstarts.written(PAGE, FOUND) == PAGE


def test_a_plan_that_does_not_fit_says_so():
    for each in FOUND.values():
        shown = quickstarts.shown(each)
        assert ("does not fit" in shown) == (each.verdict == "DOES NOT FIT")
        assert ("†" in shown) == (not each.lossless and each.verdict != "DOES NOT FIT")
