"""YAML and JSON of users beyond the limits: each ends at once in one line, at every place that reads them."""

import json
import os
import time

import pytest
import yaml
from commands import DIGITS
from hypothesis import given
from hypothesis import strategies as st
from plan_files import plan_of, write

from bigdit.catalog.resolve import read_model_config
from bigdit.commands.extract import _parse as parse_resources
from bigdit.config.load import read_ds_config
from bigdit.config.plan_file import read_plan_file
from bigdit.config.stages import load_run
from bigdit.config.strategy_text import parse_strategy
from bigdit.documents import parse_json, parse_yaml
from bigdit.errors import UserError
from bigdit.search.calibration import read as read_receipts
from bigdit.sources.open import open_source

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text("aä :-'\"\n"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
)


def laughs(levels=30, width=9):
    """A document of `levels` short lines. Each aliases the one before it `width` times."""
    lines = ["a0: &a0 [" + "lol, " * width + "]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{f'*a{i - 1}, ' * width}]" for i in range(1, levels)])


def merges(levels=30, width=9):
    """The same with merge keys."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    return "\n".join(lines + [f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * width}]}}" for i in range(1, levels)])


CHAIN = "\n".join(["a0: &a0 [0]", *(f"a{i}: &a{i} {'[' * 9}*a{i - 1}{']' * 9}" for i in range(1, 9))])

YAML = {
    laughs(): "too large: 25000 values are the most, aliases followed (line 5)",
    merges(): "too large: 25000 values are the most, aliases followed (line 5)",
    "a: [" + "1, " * 2**20: "too large: 1048576 bytes are the most, and it has 3145732",
    "[" + "1," * 30_000: "too large: 25000 values are the most (line 1)",
    CHAIN: "nested too deeply: 64 levels are the most, aliases followed (line 8)",
    "a: &a [*a]": "endless: an alias contains itself (line 1)",
    "a:\n " + "[" * 3000 + "]" * 3000: "nested too deeply: 64 levels are the most (line 2)",
    "\n".join(" " * i + "a:" for i in range(1000)): "nested too deeply: 64 levels are the most (line 64)",
    "a: 1\nb: " + "9" * 400: "beyond 64 bits in an integer of 400 digits (line 2)",
    "a: " + "9" * 9999: "beyond 64 bits in an integer of 9999 digits (line 1)",
    "a: 18446744073709551616": "beyond 64 bits in an integer of 20 digits (line 1)",
    "a: {b: 1,\n b: 2}": "ambiguous: the key b is repeated (line 2)",
    'a: "x\\0y"': "not valid: the text 'x\\x00y' (line 1) holds what no file name can",
    'a: "\\ud800"': "not valid: the text '\\ud800' (line 1) holds what no file name can",
    "a: [": "not YAML: expected the node content, but found '<stream end>' (line 1)",
    "a:\n\tb: 1": "not YAML: found character '\\t' that cannot start any token (line 2)",
    "a: 2026-13-45": "not YAML: month must be in 1..12",
    "a: !!timestamp x": "not YAML: ",
    "a: \x1b[31m": "not YAML: ",
}
JSON = {
    '{"a": ' + "[" * 3000 + "]" * 3000 + "}": "nested too deeply: 64 levels are the most",
    "[" * 100_000: "nested too deeply: 64 levels are the most",
    '{"a": ' * 100_000: "nested too deeply: 64 levels are the most",
    '{"a": 1' + "0" * 400 + "}": "beyond 64 bits in an integer of 401 digits",
    '{"a": 1' + "0" * 9999 + "}": "beyond 64 bits in an integer of 10000 digits",
    '{"a": {"b": 1, "b": 2}}': "ambiguous: the key b is repeated",
    "[" + "1," * 2**23: "too large: 16777216 bytes are the most, and it has 16777217",
    "{" + "".join(f'"{key}": 1, ' for key in range(60_000)) + '"9": 1}': "ambiguous: the key 9 is repeated",
    '{"a\\u0000": 1}': "not valid: the text 'a\\x00' holds what no file name can",
    '{"a": "\\ud800"}': "not valid: the text '\\ud800' holds what no file name can",
    "{": "not JSON: ",
    '"\\xff': "not JSON: ",
}


def refusal(read, *arguments):
    """The line of a refusal, which came at once."""
    began = time.process_time()
    with pytest.raises((UserError, ValueError)) as caught:
        read(*arguments)
    assert time.process_time() - began < 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", YAML, ids=lambda text: YAML[text][:40])
def test_yaml_beyond_the_limits(text):
    assert refusal(parse_yaml, text).startswith(YAML[text])


@pytest.mark.parametrize("text", JSON, ids=lambda text: f"{JSON[text][:40]} {len(text)}")
def test_json_beyond_the_limits(text):
    assert refusal(parse_json, text).startswith(JSON[text])


def test_bytes_that_are_no_utf_8():
    assert refusal(parse_yaml, b"a: \xff").startswith("not YAML: ")
    assert refusal(parse_json, b'{"a": "\xff"}').startswith("not JSON: ")


@given(PLAIN)
def test_values_within_the_limits_are_what_the_libraries_read(value):
    assert parse_json(json.dumps(value)) == value
    text = yaml.safe_dump(value, allow_unicode=True)
    assert parse_yaml(text) == yaml.safe_load(text)


def test_a_class_for_each_of_imagenet_21k_is_within_the_limits():
    classes = [f"n{number:08d}, one name, and another name" for number in range(21_841)]
    assert parse_yaml(json.dumps(classes)) == classes


def test_aliases_and_merges_of_honest_documents_stay():
    text = (
        "base: &base {lr: 1, steps: [1, 2]}\nrun: {<<: *base, lr: 2}\nlist: [*base, *base]\nbig: 0xffff_ffff_ffff_ffff"
    )
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None


BOMB = "too large: 25000 values are the most"
DEEP = "nested too deeply: 64 levels are the most"


def test_every_document_of_a_user_is_read_within_the_limits(tmp_path):
    """Each place names the file, with the reason above."""
    (tmp_path / "run.yaml").write_text(
        "model:\n  kwargs:\n" + "\n".join(f"    {line}" for line in laughs().splitlines())
    )
    assert refusal(load_run, tmp_path / "run.yaml").startswith(f"the config {tmp_path}/run.yaml is {BOMB}")
    nested = f"model.kwargs={'[' * 3000}"
    assert refusal(load_run, DIGITS, [nested]).endswith(f"the value is {DEEP} (line 1)")
    assert "ambiguous: the key train is repeated" in refusal(load_run, _config(tmp_path, "train: {}"))
    for override in ('data.features="a\\0b"', 'output="a\\0b"'):
        assert "holds what no file name can" in refusal(load_run, DIGITS, [override])
    assert refusal(load_run, DIGITS, [f"train.steps={'9' * 400}"]).endswith("an integer of 400 digits (line 1)")

    plan = write(plan_of(), tmp_path / "plan") / "plan.yaml"
    plan.write_text(laughs())
    assert refusal(read_plan_file, plan).startswith(f"{plan} is damaged: {BOMB}")
    (tmp_path / "strategy.yaml").write_text(laughs())
    assert BOMB in refusal(parse_strategy, [str(tmp_path / "strategy.yaml")])
    assert DEEP in refusal(parse_strategy, [f"ds_config={'[' * 3000}{']' * 3000}"])
    assert DEEP in refusal(parse_resources, [f"mem={'[' * 3000}"])

    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    assert refusal(read_ds_config, tmp_path / "config.json") == f"strategy.ds_config: {tmp_path}/config.json is {DEEP}"
    assert DEEP in refusal(read_model_config, tmp_path)
    (tmp_path / "receipts").mkdir()
    for number, text in enumerate(("[" * 100_000, '{"steps": 1' + "0" * 400 + "}", "\0")):
        (tmp_path / f"receipts/{number}.json").write_text(text)
    found, notices = read_receipts([tmp_path / "receipts"])
    assert (found, len(notices)) == ([], 3)
    assert notices[0] == f"{tmp_path}/receipts/0.json is no receipt and was ignored: it is {DEEP}"


def test_a_pipe_in_a_document_s_place_is_not_waited_for(tmp_path):
    names = ("run.yaml", "plan.yaml", "strategy.yaml", "ds.json", "config.json", "rows.csv", "rows.parquet", "a.tar")
    for name in names:
        os.mkfifo(tmp_path / name)
    doors = [
        (load_run, tmp_path / "run.yaml"),
        (read_plan_file, tmp_path),
        (parse_strategy, [str(tmp_path / "strategy.yaml")]),
        (read_ds_config, tmp_path / "ds.json"),
        (read_model_config, tmp_path),
    ]
    for name in names[-3:]:
        columns = ["data.images.image=image", "data.images.captions=[text]"] if name != "a.tar" else []
        overrides = [f"data.images={{path: {tmp_path / name}}}", *columns, f"data.features={tmp_path}/features"]
        doors.append((open_source, load_run(DIGITS, overrides).data))
    for door in doors:
        assert "it is a named pipe, and a regular file was expected" in refusal(*door), door


def _config(folder, more):
    file = folder / "twice.yaml"
    file.write_text(f"{DIGITS.read_text()}\n{more}\n")
    return file
