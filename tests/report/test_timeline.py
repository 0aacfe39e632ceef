"""The image of a timeline, and its ledger's tables for a GPU."""

from __future__ import annotations

import itertools
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from colours import VISIONS, lab, rgb
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table
from traces import MIB, timeline, timelines

from bigdit.errors import UserError
from bigdit.memory import CATEGORIES, Block, Span, Timeline, ledger
from bigdit.memory.process import ByteRange
from bigdit.report import plan as tables
from bigdit.report.figures import COLOURS, MOST_COLUMNS, columns, live_bytes, save, timeline_figure

STEP = Timeline(
    (
        Block(40 * MIB, "parameter", "proj"),
        Block(60 * MIB, "saved activation", "proj"),
        Block(30 * MIB, "gradient", "aten.mm"),
        Block(4 * MIB, "temporary", "aten.mul"),
    ),
    (1, 2, 3, 4, -4, -2, -3),
    (Span("init", 0, 1), Span("forward", 1, 2), Span("backward", 2, 6), Span("step", 6, 7)),
)


def painted(path: Path) -> dict[str, int]:
    """Pixels in each category's colour."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))
    return {name: int((pixels == rgb(colour)).all(axis=-1).sum()) for name, colour in COLOURS.items()}


def test_layers_cover_the_image_as_bytes_cover_the_events(tmp_path: Path) -> None:
    save(timeline_figure(STEP, title="a step"), tmp_path / "memory.png")
    found = painted(tmp_path / "memory.png")
    drawn = {"parameter", "saved activation", "gradient", "temporary"}
    assert {name for name, count in found.items() if count > 100} == drawn
    # Each interval between two events has equally many pixels: 6 × 40 MiB of parameters, 4 × 60 of activations, 4 × 30
    # of gradients and 1 × 4 of temporaries. Lines and the legend cost a few in a hundred.
    assert found["saved activation"] / found["parameter"] == pytest.approx(240 / 240, rel=0.1)
    assert found["gradient"] / found["parameter"] == pytest.approx(120 / 240, rel=0.1)


def test_a_gpus_line_lifts_the_top_and_a_far_one_does_not(tmp_path: Path) -> None:
    parameter = {}
    for name, gpu in (("none", None), ("near", 200 * MIB), ("far", 2000 * MIB)):
        save(timeline_figure(STEP, title="a step", gpu_bytes=gpu), tmp_path / f"{name}.png")
        parameter[name] = painted(tmp_path / f"{name}.png")["parameter"]
    assert parameter["near"] < 0.8 * parameter["none"]
    assert parameter["far"] == pytest.approx(parameter["none"], rel=0.05)


@pytest.mark.parametrize("trace", [Timeline((), (), ()), timeline(3, 700, -1, -2), timeline(0, -1)])
def test_small_and_empty_timelines_are_drawn(trace: Timeline, tmp_path: Path) -> None:
    save(timeline_figure(trace, title="small", gpu_bytes=1000), tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as image:
        assert image.size == (1440, 672)


def test_a_image_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*memory\.png: File exists"):
        save(timeline_figure(STEP, title="a step"), tmp_path / "file" / "memory.png")


@given(timelines(), st.integers(2, 20))
def test_what_is_drawn_keeps_the_peak_of_each_stretch(trace: Timeline, most: int) -> None:
    live = live_bytes(trace)
    total = live.sum(axis=0)
    assert total.max() == ledger(trace).peak_allocated_bytes
    assert (live >= 0).all()
    drawn = columns(total, most)
    assert len(drawn) <= most
    assert total[drawn].max() == total.max()
    assert drawn[-1] == len(total) - 1
    assert (np.diff(drawn) > 0).all()
    assert np.diff(drawn, prepend=0).max() <= 2 * -(-len(total) // (most - 1))
    assert list(columns(total)) == list(range(len(total))) or len(total) >= MOST_COLUMNS


# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
@pytest.mark.parametrize("vision", VISIONS)
def test_every_category_has_a_colour_that_no_eye_takes_for_another(vision: str) -> None:
    assert set(COLOURS) == set(CATEGORIES)
    seen = {name: lab(colour, np.array(VISIONS[vision])) for name, colour in COLOURS.items()}
    for one, other in itertools.combinations(seen, 2):
        # CIE 1976: a difference of 2 is just visible, and 10 at a glance.
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


def text(*shown: Table) -> str:
    out = StringIO()
    console = Console(width=80, no_color=True, file=out, highlight=False)
    for each in shown:
        console.print(each)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return "".join(line.rstrip() + "\n" for line in lines)


def test_phases_and_what_is_allocated_at_the_peak() -> None:
    assert (
        text(tables.phases(ledger(STEP)), tables.at_peak(ledger(STEP)))
        == """\
by phase
phase     peak allocated  left at its end
─────────────────────────────────────────
init           40.00 MiB        40.00 MiB
forward       100.00 MiB       100.00 MiB
backward      ◂ 0.13 GiB        70.00 MiB
step           70.00 MiB        40.00 MiB
◂ peak phase; phases are not summed
allocated at the peak, in backward
category              bytes    share
────────────────────────────────────
parameter         40.00 MiB   29.9 %
gradient          30.00 MiB   22.4 %
saved activation  60.00 MiB   44.8 %
temporary          4.00 MiB    3.0 %

total allocated    0.13 GiB  100.0 %
"""
    )


def test_the_way_to_what_nvidia_smi_shows() -> None:
    assert (
        text(tables.process(150 * MIB, ByteRange(low_bytes=148 * MIB, high_bytes=645 * MIB), 751 * MIB))
        == """\
on the GPU
                                low        high
───────────────────────────────────────────────
reserved by torch          0.15 GiB    0.15 GiB
CUDA context and NCCL      0.14 GiB    0.63 GiB

process, as in nvidia-smi  0.29 GiB    0.78 GiB
usable bytes of the GPU    0.73 GiB    0.73 GiB
left                       0.44 GiB  -44.00 MiB
"""
    )
