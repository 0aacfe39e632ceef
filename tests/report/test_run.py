"""The page of a run: every number is the run's, and it is one whole file at any time of the run."""

import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from browser import browser, width
from commands import in_process
from PIL import Image
from quantities import leaves, quantities, reads, visible

from bigdit.errors import UserError
from bigdit.report import leaving_a_page
from bigdit.report import run as report
from bigdit.report.run import MOST_POINTS, charts, page, read_run
from bigdit.train.record import PhaseMemory, PlannedMemory, RunRecord
from bigdit.units import GIB, MIB, duration, gib

INSIDE = """
return [...document.querySelectorAll("main, main *")].every(each => each.getBoundingClientRect().right <= innerWidth)
"""
LEFT = ("metrics.jsonl", "run.json", "receipt.json")


@pytest.fixture
def run(trained, tmp_path):
    """The tiny run's output, without weights."""
    output = tmp_path / "run"
    output.mkdir()
    for name in LEFT:
        (output / name).write_bytes((trained / name).read_bytes())
    for folder in ("checkpoints", "exports"):
        for each in (trained / folder).iterdir():
            (output / folder / each.name).mkdir(parents=True)
    return output


@pytest.fixture
def planned(run):
    """The same, as if it had run on a GPU, by a plan, with validation images."""
    record = RunRecord.model_validate_json((run / "run.json").read_text())
    sizes = {"init": 4 * MIB, "forward": 36 * MIB, "backward": 40 * MIB, "step": 12 * MIB}
    phases = {phase: 3 * nbytes // 4 for phase, nbytes in sizes.items()}
    memory = {"peak_allocated_bytes": max(phases.values()), "peak_reserved_bytes": 40 * MIB}
    found = tuple(PhaseMemory(phase=phase, allocated_bytes=nbytes) for phase, nbytes in sizes.items())
    peaks = {"peak_allocated_bytes": 40 * MIB, "peak_reserved_bytes": 44 * MIB}
    measured = record.measured.model_copy(update={"phases": found, **peaks})
    asked = {"captions": ["<script>alert(1)</script>", "a & b"], "every": 2}
    seen = record.run.model_dump(mode="json") | {"samples": asked, "validation": {"samples": 32}, "output": str(run)}
    record.model_copy(
        update={
            "run": type(record.run).model_validate(seen),
            "device": "NVIDIA A40",
            "planned": PlannedMemory(resolution=(8, 12), phases=phases, **memory),
            "measured": measured,
        }
    ).write()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3] |= {"validation_loss": 1.25}
    rows[5] |= {"loss": None, "grad_norm": None, "skipped": True}
    rows[7] |= {"validation_loss": 1.125, "ema_validation_loss": 1.0625}
    write_rows(run, rows)
    (run / "samples").mkdir()
    for step in (2, 4, 6, 8):
        pixels = np.random.default_rng(step).integers(0, 256, (24, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(run / f"samples/step-{step:08d}.png")
    (run / "samples/step-00000008.webp").touch()  # videos, which move
    return run


def write_rows(output, rows):
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_number_is_one_that_the_run_left(planned):
    found = read_run(planned)
    left = [json.loads(line) for line in (planned / "metrics.jsonl").read_text().splitlines()]
    left += [json.loads((planned / name).read_text()) for name in LEFT[1:]]
    left += [str(path.relative_to(planned)) for path in planned.rglob("step-*")]
    numbers = {value for value in leaves(left) if not isinstance(value, str)}
    printed = quantities(" ".join(value for value in leaves(left) if isinstance(value, str)))
    printed |= quantities(duration(found.receipt.seconds))
    measured, expected = found.record.measured, found.record.planned
    pairs = [(phase.allocated_bytes, expected.phases[phase.phase]) for phase in measured.phases]
    pairs.append((measured.peak_reserved_bytes, expected.peak_reserved_bytes))
    numbers |= {100 * (one / other - 1) for one, other in pairs}
    numbers |= {found.steps, found.record.strategy.global_batch_size, *found.images}
    losses = {f"{row[key]:.4f}" for row in found.rows for key in row if "loss" in key and row[key] is not None}
    shown = visible(re.sub("<pre>.*?</pre>", "", page(found), flags=re.DOTALL))
    quantities_shown = quantities(shown)
    assert len(quantities_shown) > 40
    zone = {("00", "")}  # a time that JSON writes with Z
    made_up = {each for each in quantities_shown - printed - zone if not any(reads(value, *each) for value in numbers)}
    assert {number for number, _ in made_up} - losses == set()


def test_an_average_of_the_weights_is_named(run):
    found = read_run(run)
    assert "<dt>EMA</dt><dd>none</dd>" in page(found)
    settings = found.record.strategy.model_dump(mode="json") | {"ema": {"decay": 0.9, "device": "cpu"}}
    averaged = found.record.model_copy(update={"strategy": type(found.record.strategy).model_validate(settings)})
    assert "<dt>EMA</dt><dd>in fp32 in CPU memory</dd>" in page(replace(found, record=averaged))


def test_memory_by_phase_stands_next_to_the_plan(planned):
    found = read_run(planned)
    text = " ".join(visible(page(found)).split())
    assert "planned 40.00 MiB at 8 × 12, measured 44.00 MiB (+10.0 %) reserved by torch" in text
    assert "init 4.00 MiB 3.00 MiB +33.3 % forward 36.00 MiB 27.00 MiB +33.3 % backward ◂ 40.00 MiB" in text
    assert text.count("+33.3 %") == 4
    assert text.count("◂") == 1


def test_a_run_without_a_plan_has_what_was_measured(run):
    record = read_run(run).record
    receipt = json.loads((run / "receipt.json").read_text())
    assert record.measured.peak_allocated_bytes == receipt["measured_peak_allocated_bytes"]
    assert (record.measured.phases, record.measured.peak_reserved_bytes) == ((), None)
    text = " ".join(visible(page(read_run(run))).split())
    assert f"The process needed at most {gib(record.measured.peak_allocated_bytes)} through 2 steps" in text
    assert "planned" not in text
    assert "DONE all of 8 steps" in text


def test_the_settings_are_the_runs(planned):
    text = page(read_run(planned))
    (settings,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    assert yaml.safe_load(html.unescape(settings)) == json.loads((planned / "run.json").read_text())["run"]


def test_it_needs_nothing_next_to_itself_and_captions_are_text(planned):
    text = page(read_run(planned))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;; a &amp; b" in text
    assert len(re.findall(r'src="data:image/jpeg;base64,[\w+/=]+"', text)) == text.count("src=") == 4
    assert re.findall(r'after (\d) steps, <a href="samples/step-(\d+).webp">video</a>', text) == [("8", "00000008")]
    for address in re.findall(r'<a href="([^"]*)"', text):
        assert (planned / address).exists()
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    labels = " ".join(re.findall(r'aria-labelledby="([^"]*)"', text)).split()
    assert set(labels) <= set(ids)
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= defined | {"--colour"}


def test_many_large_images_make_no_large_page(run, monkeypatch):
    monkeypatch.setattr(report, "IMAGE_BYTES", 15_000)
    (run / "samples").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    for step in range(1, 12):
        Image.fromarray(pixels).save(run / f"samples/step-{step:08d}.png")
    (run / "samples/step-00000011.png").write_text("no image")
    text = page(read_run(run))
    shown = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert 40_000 < sum(map(len, shown)) <= 120_000
    assert re.findall(r"after ([\d,]+) steps</figcaption>", text) == ["9", "7", "5", "3", "1"]
    assert "step-00000011.png cannot be read: cannot identify image file" in text


def test_a_run_that_has_not_ended_has_its_page(planned):
    rows = read_run(planned).rows
    write_rows(planned, rows[:5])
    found = read_run(planned)
    assert found.receipt is None  # of an earlier end
    text = " ".join(visible(page(found)).split())
    assert "NOT FINISHED 5 of 8 steps; the same command resumes" in text
    assert "in the last steps" in text
    for name in LEFT[1:]:
        (planned / name).unlink()
    text = " ".join(visible(page(read_run(planned))).split())
    assert "5 steps of an unknown number: there is no readable run.json" in text
    assert "Not measured" in text


def test_what_is_damaged_is_left_out_and_reported(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "los')
    (run / "run.json").write_text("{")
    receipt = json.loads((run / "receipt.json").read_text()) | {"steps": "x"}
    (run / "receipt.json").write_text(json.dumps(receipt))
    done = in_process("report", run)
    assert done.returncode == 0, done.stderr
    notes = done.stderr.splitlines()
    assert notes[0] == f"note: 1 of 9 lines of {run}/metrics.jsonl hold no row, and were left out"
    assert notes[1].startswith(f"note: {run}/run.json is damaged: it is not JSON: ")
    assert notes[2].startswith(f"note: {run}/receipt.json is damaged: steps: Input should be a valid integer")
    assert notes[3:] == [f"wrote {run}/report.html"]
    assert "run.json is damaged" in (run / "report.html").read_text()


def test_json_has_all_of_it(planned):
    done = in_process("report", planned, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(json.dumps(read_run(planned).document()))
    assert len(found["metrics"]) == found["steps"] == found["total"] == 8
    assert found["checkpoints"] == found["exports"] == ["step-00000008"]
    assert not (planned / "report.html").exists()


def test_where_no_run_is_a_line_says_so(tmp_path):
    wanted = "name the output folder of a run that has ended, or taken ten steps"
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError) as error:
        read_run(tmp_path)
    assert str(error.value) == f"report: {path} does not exist; {wanted}"
    path.write_text("nothing\n")
    with pytest.raises(UserError) as error:
        read_run(tmp_path)
    assert str(error.value) == f"report: {path} has no readable row; {wanted}"


def ends_early(output, rows):
    with leaving_a_page(output):
        write_rows(output, rows)
        raise KeyError("what ends the run")


def test_a_page_is_left_where_rows_were_written_and_never_fails_a_run(run, capfd):
    with leaving_a_page(run):
        pass
    assert not (run / "report.html").exists()
    rows = read_run(run).rows
    with pytest.raises(KeyError):
        ends_early(run, rows[:6])
    assert "6 of 8 steps" in (run / "report.html").read_text()
    assert capfd.readouterr().err == f"wrote {run}/report.html\n"
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    with leaving_a_page(run):
        write_rows(run, rows)
    assert (
        capfd.readouterr().err
        == f"note: {run}/report.html was not written: cannot write {run}/report.html: Is a directory\n"
    )


def titles(drawn):
    return re.findall(r"<title [^>]*>(.*), against steps</title>", "".join(drawn))


def test_each_number_has_a_chart_that_says_its_ends(run):
    rows = read_run(run).rows
    write_rows(run, [row | {"memory_bytes": 2 * GIB, "planned_memory_bytes": 3 * GIB, "mfu": 0.5} for row in rows])
    drawn = charts(read_run(run))
    wanted = ["Loss", "Norm of the gradients", "Learning rate", "Samples a second", "Memory, GiB", "MFU, %"]
    assert [title.removesuffix(", log scale") for title in titles(drawn)] == wanted
    assert f"training: from {rows[0]['loss']:.4g} to {rows[-1]['loss']:.4g}" in drawn[0]
    assert "now: from 2 to 2; peak so far: from " in drawn[4]
    assert drawn[4].endswith("</svg>\n")
    assert "planned: from 3 to 3</desc>" in drawn[4]
    assert "MFU: from 50 to 50" in drawn[5]


def test_a_line_of_many_rows_is_no_longer_than_one_of_few(run):
    rows = read_run(run).rows
    sizes = []
    for times in (MOST_POINTS, 5 * MOST_POINTS):
        write_rows(run, [rows[0] | {"step": step + 1, "loss": 1.0 + step % 2} for step in range(times)])
        sizes.append(len(charts(read_run(run))[0]))
    assert sizes[1] < 1.1 * sizes[0]


def test_far_apart_is_logarithmic_and_reported(run):
    rows = read_run(run).rows
    write_rows(run, [row | {"grad_norm": 10.0 ** -row["step"], "loss": -row["step"]} for row in rows])
    assert titles(charts(read_run(run)))[:2] == ["Loss", "Norm of the gradients, log scale"]


@pytest.mark.slow
def test_on_a_narrow_screen_nothing_lies_beside_it(planned):
    in_process("report", planned)
    with browser() as seen:
        for pixels in (400, 1200):
            width(seen, pixels)
            seen.get((planned / "report.html").as_uri())
            assert seen.execute_script(INSIDE), pixels
        assert seen.get_log("browser") == []
