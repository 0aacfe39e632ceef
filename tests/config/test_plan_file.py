"""plan.yaml is read as it was written, or not at all."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plan_files import STRATEGIES, plan_of, problems, write, zero2

from bigdit.config.plan_file import read_plan_file
from bigdit.strategy import Strategy


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.engine)
def test_a_plan_is_read_as_it_was_written(strategy, tmp_path):
    plan = plan_of(strategy)
    folder = write(plan, tmp_path / "plan")
    assert read_plan_file(folder) == read_plan_file(folder / "plan.yaml") == plan


def test_comments_and_layout_are_no_edit(tmp_path):
    file = write(plan_of(), tmp_path / "plan") / "plan.yaml"
    document = yaml.safe_load(file.read_text())
    file.write_text("# looked at\n" + yaml.safe_dump(document, default_flow_style=True))
    assert read_plan_file(file) == plan_of()


WRITTEN = "set plan to null, or to one that `bigdit plan` wrote"
EDITED = (
    "was changed: its digest does not match; put settings into the run.yaml in its folder, or run `bigdit plan` "
    "again, with --out"
)


def leaves(document, path=()):
    if not isinstance(document, dict):
        return [path]
    return [leaf for key, value in document.items() for leaf in leaves(value, (*path, key))]


def test_any_edit_is_noticed(tmp_path):
    file = write(plan_of(zero2()), tmp_path / "plan") / "plan.yaml"
    original = file.read_text()
    for path in leaves(yaml.safe_load(original)):
        if path == ("format",):
            continue
        document = yaml.safe_load(original)
        node = document
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = "other"
        file.write_text(yaml.safe_dump(document))
        assert problems(read_plan_file, file) == [f"{file} {EDITED}"], path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 2\n", "has format 2, and this bigdit reads 1; run `bigdit plan` again, with --out"),
        ("", "is damaged: it holds no keys; run `bigdit plan` again, with --out"),
        ("- 1\n", "is damaged: it holds no keys; run `bigdit plan` again, with --out"),
        ("model: {}\n", "has format None, and this bigdit reads 1; run `bigdit plan` again, with --out"),
        ("format: 1\n2026-01-01: a day\n", EDITED),
        ("format: 1\n1: a\nb: c\n", EDITED),
        ("a: [", "is damaged: not YAML: "),
        ("a: !!python/object/apply:os.getcwd []\n", "is damaged: not YAML: could not determine a constructor"),
    ],
)
def test_what_is_no_plan_is_one_line(text, message, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    (found,) = problems(read_plan_file, file)
    assert found.startswith(f"{file} {message}")
    assert "\n" not in found


def test_a_cut_off_plan_is_refused(tmp_path):
    file = write(plan_of(), tmp_path / "plan") / "plan.yaml"
    text = file.read_text()
    for end in range(0, len(text) - 1, 97):
        file.write_text(text[:end])
        assert len(problems(read_plan_file, file)) == 1


def test_binary_and_missing_files(tmp_path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    assert problems(read_plan_file, tmp_path)[0].startswith(f"{tmp_path}/plan.yaml is damaged: not YAML: ")
    none = tmp_path / "none"
    assert problems(read_plan_file, none) == [f"plan: {none} does not exist; {WRITTEN}"]
    none.mkdir()
    assert problems(read_plan_file, none) == [f"plan: {none}/plan.yaml does not exist; {WRITTEN}"]


def test_a_plan_of_other_keys_is_one_line(tmp_path):
    """Another version of bigdit wrote it, with its digest."""
    from bigdit.config import plan_file

    file = tmp_path / "plan.yaml"
    document = plan_of().model_dump(mode="json") | {"colour": "blue", "batch": {"latents": [1]}}
    file.write_text(yaml.safe_dump(document | {"digest": plan_file._digest(document)}))
    (found,) = problems(read_plan_file, file)
    assert found.startswith(f"{file} was written by another version of bigdit: batch.latents.")
    assert found.endswith("; run `bigdit plan` again, with --out")


@given(st.integers(1, 300), st.integers(1, 16))
def test_processes_are_spread_over_the_fewest_machines(world, gpus_per_node):
    machines = plan_of(Strategy(engine="fsdp2", world_size=world), gpus_per_node=gpus_per_node).machines
    assert (machines - 1) * gpus_per_node < world <= machines * gpus_per_node
