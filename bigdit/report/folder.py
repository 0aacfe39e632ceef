"""The folder of a plan: all of its files, or none of them."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from bigdit.config.plan_file import DS_CONFIG, FILE, read_plan_file, text_digest, write_plan_file
from bigdit.errors import UserError
from bigdit.files import TEMPORARY, check_writable, commit_folder, read_bytes, write_json, write_text
from bigdit.memory import Timeline
from bigdit.report.figures import plot_curves, plot_timeline
from bigdit.report.how_to_run import RUN, as_yaml, renewed, skeleton
from bigdit.report.page import page
from bigdit.report.words import subject
from bigdit.search.of_run import planned_run
from bigdit.search.plan import Plan, record

JSON, PAGE, MEMORY, CURVE = "plan.json", "report.html", "memory.png", "curve.png"
OURS = {FILE, DS_CONFIG, JSON, PAGE, MEMORY, CURVE, RUN}


def check_folder(folder: Path) -> None:
    """Raise UserError where a plan could not be written to `folder`: known before it is made, which takes a while."""
    _kept_run(folder)
    check_writable("--out", folder)


def write_plan(plan: Plan, folder: Path, others: Sequence[Plan] = (), run: str | None = None) -> list[Path]:
    """Write `plan`'s files. They replace an older plan in `folder`; of a run.yaml that was edited since, the strategy
    alone. `run`: the text of run.yaml where it is not the plan's own. The page shows the `others` too: plans for other
    numbers of GPUs.

    Raises UserError where `folder` holds anything that no plan wrote, and where it cannot be written.
    """
    kept = _kept_run(folder)
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        _fill(plan, others, temporary, folder, run or (skeleton(plan) if kept is None else renewed(kept, plan)))
        commit_folder(temporary, folder)
    except OSError as error:
        raise UserError(f"--out: cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(folder.iterdir())


def write_stages(
    plans: Sequence[Plan], out: Path, folders: Sequence[Path], config: Path, overrides: Sequence[str]
) -> None:
    """Write the plans of a run's stages to their `folders`, and the run of `config` with their strategies to `out`; of
    a run without stages both to `out`."""
    strategies = [plan.chosen.strategy for plan in plans]
    text = as_yaml(
        planned_run(config, overrides, strategies, [str((each / FILE).relative_to(out)) for each in folders])
    )
    if [*folders] == [out]:
        write_plan(plans[0], out, run=text)
        return
    for plan, folder in zip(plans, folders, strict=True):
        write_plan(plan, folder)
    write_text(out / RUN, text)


def _fill(plan: Plan, others: Sequence[Plan], temporary: Path, folder: Path, run: str | None) -> None:
    write_plan_file(temporary / FILE, record(plan, run))
    write_text(temporary / JSON, document(plan))
    if plan.chosen.strategy.ds_config is not None:
        write_json(temporary / DS_CONFIG, plan.chosen.strategy.ds_document)
    if run is not None:
        write_text(temporary / RUN, run)
    title = f"{plan.question.model.name} on {subject(plan)}, {plan.chosen.title}"
    card = plan.question.gpu.usable_bytes
    plot_timeline(Timeline.unpack(plan.packed_timeline), temporary / MEMORY, title=title, card_bytes=card)
    if plan.curves:
        plot_curves(plan, temporary / CURVE)
    write_text(temporary / PAGE, page(plan, folder, others=others))


def document(plan: Plan) -> str:
    """`plan` as JSON: what `--json` prints, and what that leaves out, its timeline and all that ran."""
    return json.dumps(plan.model_dump(mode="json") | {"fits": plan.fits}, indent=2) + "\n"


def _kept_run(folder: Path) -> str | None:
    """The run.yaml in `folder` where someone has edited it. Raises UserError unless a plan may take the folder."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"--out: {folder} is a file; name a folder")
    found = {file.name for file in folder.iterdir()}
    if not found:
        return None
    if FILE not in found:
        raise UserError(f"--out: {folder} holds {_some(found)} and no plan; name another folder, or an empty one")
    if found - OURS:
        raise UserError(
            f"--out: {folder} holds {_some(found - OURS)}, which no plan wrote and a new one would delete; move it, "
            "or name another folder"
        )
    try:
        text = read_bytes(folder / RUN).decode() if RUN in found else None
        known = read_plan_file(folder / FILE).run_digest
    except (OSError, ValueError, UserError):  # of another version, or damaged: better keep too much
        known = None
    return None if text is None or text_digest(text) == known else text


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (" …" if len(names) > 3 else "")
