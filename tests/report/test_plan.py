"""A plan in the terminal: its lines and their order at 80 columns, and the commands that run it."""

import math
import re
from pathlib import Path

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantities import visible

from bigdit import catalog
from bigdit.cli import main
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.report import words
from bigdit.report.page import Answer, page
from bigdit.report.plan import needs, speed
from bigdit.search.rows import recommended
from bigdit.speed.seconds import Handed, Interval
from bigdit.strategy import Strategy
from bigdit.units import GIB, KIB, MIB, gib, unit_of


@pytest.fixture(scope="module")
def made():
    return plans.made_plan()


WAYS = {
    "fits": plans.made_plan,
    "does not fit": plans.unfitting_plan,
    "32 GPUs": plans.sharded_plan,
}


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
@pytest.mark.parametrize("way", WAYS)
def test_it_reads_at_80_columns_and_without_colour(way):
    plan = WAYS[way]()
    text = plans.shown(plan, Path("plans/sana"))
    assert max(map(len, text.splitlines())) <= 80
    assert len(plans.shown(plan.model_copy(update={"waterfall": ()}), Path("plans/sana")).splitlines()) <= 95
    assert "\x1b" not in text
    assert all(sign.isprintable() or sign == "\n" for sign in text)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_the_answer_comes_first_and_the_commands_last(made):
    text = plans.shown(made, Path("plans/sana"))
    order = [
        "sana-1600m-1024, 1.604 B parameters, 1024 × 1024 pixels, on one NVIDIA A40",
        "FITS: needs ",
        "recommended",
        "checkpointing  12 of 20 blocks recomputed in the backward pass",
        "batch          micro-batch 8 × 32 accumulated = 256 a step",
        "speed and cost",
        "memory by phase",
        "largest micro-batch",
        "alternatives",
        "rejected",
        "CPU memory and disk",
        "note: Gemma-2's text encoder",
        "bigdit train --config plans/sana/run.yaml",
        "python launch/train.py --config plans/sana/run.yaml",
    ]
    places = [text.index(line) for line in order]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_launches_say_their_source_and_what_they_mean_for_the_step(made):
    def printed(counted, bound, waits=None):
        handed = Handed(count=4338, counted=counted, seconds=Interval(low=0.02, high=0.2), bound=bound)
        parts = made.chosen.step.parts | ({} if waits is None else {"launches": waits})
        step = made.chosen.step.model_copy(update={"launches": handed, "parts": parts})
        return speed(made.model_copy(update={"chosen": made.chosen.model_copy(update={"step": step})}))["launches"]

    host = "4,338 a step, counted on an emulated GPU: 20.0–200 ms of CPU time"
    assert printed(True, "yes") == f"{host}; the step is bound by launches"
    assert printed(True, "possible") == f"{host}; the step may be bound by launches"
    assert printed(True, "no") == f"{host}, hidden behind kernels"
    assert printed(True, "no", Interval(low=0, high=0.05)) == f"{host}, hidden behind kernels except 0.00–50.0 ms"
    assert printed(False, "no").startswith("4,338 a step, one for each operator: ")


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_the_numbers_are_the_plans(made):
    text = plans.shown(made)
    process = made.chosen.process
    left = made.request.gpu.usable_bytes - process.high_bytes
    assert f"{process.low_bytes / GIB:.2f}–{gib(process.high_bytes)} of 44.35 GiB usable, {gib(left)} left" in text
    for phase in made.ledger.phases:
        assert gib(phase.peak_bytes) in text
    for category, nbytes in made.ledger.at_peak.items():
        assert category in text
        assert gib(nbytes) in text
    assert f"total allocated   {gib(made.ledger.peak_allocated_bytes)}  100.0 %" in text
    *parts, total = words.held(made).values()
    assert sum(parts) == total == process.high_bytes
    assert "step    28.4–37.1 s: compute 26.0–32.2 s, memory 2.40–4.90 s" in text
    assert "run     30,000,000 images × 1 epoch, 117,187 steps: 38.5–50.3 days" in text
    assert "cost    924–1,208 GPU-hours, 453–592 at 0.49 per GPU-hour" in text
    assert "disk        5,693–40,455 GiB for 30,000,000 encoded images" in text
    assert "each        0.06 MiB of latents, 0.13–1.32 MiB of text (1.32 MiB padded)" in text
    assert "encoding    1.85–3.59 days on all GPUs" in text
    assert "longer than training" not in text
    assert "2 more in report.html and --json" in " ".join(text.split())
    assert "plan again with --out DIR" in text
    of_classes = made.dataset.model_copy(update={"text_bytes": Interval(low=0, high=0), "padded_text_bytes": 0})
    assert needs(made.model_copy(update={"dataset": of_classes}))["each"] == "64.00 KiB of latents"


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_all_that_is_shown_ran_on_an_emulated_gpu(made):
    """In the terminal and on the page, with the build of torch. The margin is in bytes and as a share."""
    how = f"ran with exactly these settings on an emulated GPU, torch {made.emulated}"
    margin = f"safety margin {gib(words.margin(made))} (3 %)"
    for plan in (made, plans.unfitting_plan()):
        shown = " ".join(plans.shown(plan).split())
        assert f"{how}; safety margin " in shown
        shown_page = page(plan)
        assert f"<dt>memory</dt><dd>the training step {how}</dd>" in shown_page
        assert f"<dt>safety margin</dt><dd>3 %: {plan.margin.source}</dd>" in shown_page
        for text in (shown, visible(shown_page)):
            assert not re.search(r"~|predicted|confirmed|\bcards?\b|\bwants\b", text)
    assert f"{how}; {margin}, uncertainty of the CUDA context " in " ".join(plans.shown(made).split())
    assert f"{margin}, uncertainty of the CUDA context and NCCL " in " ".join(plans.shown(plans.sharded_plan()).split())


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_largest_micro_batch_that_was_not_looked_for_is_a_dash(made):
    limit = made.buckets[1].model_copy(update={"none": None, "full": None})
    plan = made.model_copy(update={"buckets": (made.buckets[0], limit)})
    assert re.search(r"^832 × 1248 +– +9 +–$", plans.shown(plan), re.M)
    assert re.search(r"832 × 1248</th>(<td class=.n.>(–|9)</td>){3}", page(plan))


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_narrow_terminal_shows_the_tables_of_memory_below_each_other(made):
    text = plans.shown(made, width=40)
    assert max(map(len, text.splitlines())) <= 40
    below = text[text.index("memory by phase") :]
    for name, nbytes in made.ledger.at_peak.items():
        assert re.search(rf"^{name} +{gib(nbytes)} ", below, re.M), name
    for phase in made.ledger.phases:
        assert re.search(rf"^{phase.phase} .*{gib(phase.peak_bytes)} *$", below, re.M), phase.phase


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_what_does_not_fit_is_answered_with_what_would():
    plan = plans.unfitting_plan()
    text = plans.shown(plan, Path("plans/sana"))
    assert "DOES NOT FIT: needs " in text
    assert f"of 15.67 GiB usable, {gib(-plan.chosen.headroom_bytes)} too much" in text
    assert text.index("what would fit") < text.index("nearest to fitting") < text.index("memory by phase")
    assert "8-bit AdamW, all blocks" in text
    assert "nothing to run: it does not fit" in text
    assert "bigdit train" not in text
    without = plan.model_copy(update={"fixes": ()})
    assert f"what would fit none {words.NO_FIX}" in " ".join(plans.shown(without).split())
    assert words.NO_FIX in page(without)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_tight_plan_says_so(made):
    assert words.margin(made) == math.ceil(made.chosen.peak_reserved_bytes * made.margin.share)
    process = made.chosen.process
    for usable_bytes, why in (
        (process.high_bytes - GIB // 8, "the low end fits"),
        (process.low_bytes - GIB, "torch must free cached memory to fit"),
    ):
        plan = tight(made, usable_bytes)
        needed = words.gibs(process.low_bytes, process.high_bytes)
        printed = f"TIGHT: needs {needed} of {gib(plan.request.gpu.usable_bytes)} usable: {why}, and the high end is "
        assert f"{printed}{gib(-plan.chosen.headroom_bytes)} too much" in " ".join(plans.shown(plan).split())


def test_what_may_not_fit_is_not_called_the_fastest_that_fits(made):
    chosen = tight(made, made.chosen.process.high_bytes - MIB).chosen
    assert recommended(chosen, [chosen]).startswith("nothing that the options allow is sure to fit")


def tight(plan, usable_bytes):
    """The plan on a GPU with so many bytes, where it is tight."""
    gpu = plan.request.gpu.model_copy(update={"usable_mib": usable_bytes // MIB})
    left = gpu.usable_bytes - plan.chosen.process.high_bytes
    chosen = plan.chosen.model_copy(update={"headroom_bytes": left, "verdict": "TIGHT"})
    request = plan.request.model_copy(update={"gpu": gpu})
    return plan.model_copy(update={"chosen": chosen, "request": request, "verdict": "TIGHT"})


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
@pytest.mark.parametrize(("verdict", "status"), [("FITS", 0), ("TIGHT", 0), ("DOES NOT FIT", 2)])
def test_a_verdict_has_its_exit_status(made, monkeypatch, capsys, verdict, status):
    reported = tight(made, made.chosen.process.high_bytes - MIB)
    reported = reported.model_copy(
        update={"verdict": verdict, "chosen": reported.chosen.model_copy(update={"verdict": verdict})}
    )
    monkeypatch.setattr("bigdit.search.answer.make_plan", lambda request, progress: reported)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "sana-1600m", "--gpu", "a40"])
    assert ended.value.code == status
    assert f"{verdict}: needs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_host_that_is_too_small_is_in_the_verdict(made):
    request = made.request.model_copy(update={"host_memory_bytes": 8 * GIB})
    text = " ".join(plans.shown(made.model_copy(update={"request": request, "verdict": "DOES NOT FIT"})).split())
    needed = f"{gib(made.host.node_bytes)} of CPU memory per machine, of 8.00 GiB (--host-memory)"
    assert f"DOES NOT FIT: needs {needed}; on the GPU it needs " in text
    assert "any size none fits: CPU memory is too small for any micro-batch" in text
    assert "--host-memory" not in plans.shown(made)
    request = request.model_copy(update={"host_assumed": True})
    assumed = made.model_copy(update={"request": request})
    text = " ".join(plans.shown(assumed).split())
    line = f"CPU memory: {gib(made.host.node_bytes)} needed per machine, more than the 8.00 GiB assumed; set it with "
    assert f" GiB left {line}--host-memory" in text
    assert "FITS: needs" in text
    assert f"<p>{line}" in page(assumed)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_what_is_reserved_is_in_the_verdict(made):
    """With the kind of GPU, if the reserve is that kind's."""
    for gpu, printed in (
        (made.request.gpu.reserving(512 * MIB), "43.85 GiB usable (0.50 GiB reserved), "),
        (catalog.gpu("rtx-a6000").reserving(), "46.89 GiB usable (0.50 GiB reserved for the display), "),
        (made.request.gpu, "44.35 GiB usable, "),
    ):
        request = made.request.model_copy(update={"gpu": gpu})
        assert f" of {printed}" in " ".join(plans.shown(made.model_copy(update={"request": request})).split())


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_a_lossy_optimizer_that_nobody_asked_for_is_in_the_first_line(made):
    lossy = made.model_copy(update={"chosen": made.chosen.model_copy(update={"lossless": False})})
    memory = f"with {gib(lossy.request.host_memory_bytes)} of CPU memory (--host-memory)"
    words = f"FITS with a lossy optimizer: nothing lossless fits {memory}"
    assert f"{words}: needs" in " ".join(plans.shown(lossy).split())
    assert f"{words}</strong>" in page(lossy)
    fixed = made.request.constraints.model_copy(update={"optimizer": "came"})
    asked = lossy.model_copy(update={"request": made.request.model_copy(update={"constraints": fixed})})
    assert "nothing lossless" not in plans.shown(asked)
    assert "FITS: needs" in plans.shown(made)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_the_way_from_the_usual_setting_is_shown_where_it_was_asked_for(made):
    text = " ".join(plans.shown(made).split())
    places = [text.index(gib(step.process_bytes), text.index("from the usual setting")) for step in made.waterfall]
    assert places == sorted(places)
    for step in made.waterfall:
        assert step.change.split()[0] in text
    way = text[text.index("from the usual setting") :]
    assert "each ran on an emulated GPU without a memory limit" in way
    assert "from the usual setting" not in plans.shown(made.model_copy(update={"waterfall": ()}))


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_encoding_that_takes_longer_than_training_is_remarked_upon(made):
    dataset = made.dataset.model_copy(update={"extraction_seconds": made.run.seconds * 2})
    text = " ".join(plans.shown(made.model_copy(update={"dataset": dataset})).split())
    assert (
        "encoding 77.0–101 days on all GPUs: longer than training (38.5–50.3 days). Images that are encoded once"
        in text
    )
    assert "Several machines can share the work" in text


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_videos_are_not_called_images(made):
    model = made.request.model.model_copy(update={"video": True})
    plan = made.model_copy(update={"request": made.request.model_copy(update={"model": model})})
    text = plans.shown(plan)
    assert "videos/s per GPU" in text
    assert "30,000,000 videos × 1 epoch" in text
    assert "30,000,000 encoded videos" in text
    assert "images" not in text
    text = page(plan)
    assert "videos/s per GPU" in text
    assert "images/s" not in text


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_where_the_search_ends_is_no_limit_of_the_gpu(made):
    assert "4096+" not in plans.shown(made)
    limit = made.buckets[0].model_copy(update={"full": LARGEST_MICRO_BATCH})
    plan = made.model_copy(update={"buckets": (limit, *made.buckets[1:])})
    text = " ".join(plans.shown(plan).split())
    assert "4096+: the search ends at 4096; larger ones may fit" in text
    assert text.count("4096+") == 2
    assert "4096+: the search ends at 4096" in page(plan)
    strategy = made.chosen.strategy.model_copy(update={"micro_batch_size": 4096})
    assert words.batch(strategy).startswith("micro-batch 4096 (where the search ends) × 32 accumulated")


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_in_python_a_plan_is_one_line_and_in_a_notebook_its_page(made):
    assert repr(made) == str(made)
    assert repr(made).startswith("<Plan sana-1600m-1024 on a40: FITS, 12 of 20 blocks checkpointed, ")
    assert len(repr(made)) < 160
    assert "\n" not in repr(made)
    assert repr(plans.sharded_plan()).startswith("<Plan sana-1600m-1024 on 32 × a40: FITS, ZeRO-2")
    answer = Answer(**dict(made))
    assert answer.model_dump() == made.model_dump()
    frame = answer._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.endswith("></iframe>")
    assert frame.count('"') == 4


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_the_recommended_row_is_shown_however_long_the_front(made):
    last = made.model_copy(update={"front": (*made.front[1:], made.chosen)})
    assert "▸ 12 of 20 blocks checkpointed" in plans.shown(last)


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
def test_most_rows_of_a_long_front_keep_the_numbers_of_the_recommended_one(made):
    own = [made.chosen] + [made.front[1].model_copy(update={"title": f"own {at}"}) for at in range(5)]
    others = [made.front[-1].model_copy(update={"title": f"lossy {at}"}) for at in range(4)]
    long = made.model_copy(update={"front": (*own, *others)})
    table = plans.shown(long).split("alternatives")[1].split("rejected")[0]
    assert re.findall(r"(?:own|lossy) \d", table) == ["own 0", "own 1", "lossy 0", "lossy 1"]
    assert "5 more in report.html and --json" in " ".join(table.split())


STRATEGIES = {
    "zero2, offload": (
        {"engine": "deepspeed", "world_size": 8},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "DeepSpeed ZeRO-2 over 8 processes, CPU offload of optimizer",
    ),
    "zero3, all": (
        {"engine": "deepspeed", "world_size": 8},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "DeepSpeed ZeRO-3 over 8 processes, CPU offload of optimizer and parameters",
    ),
    "zero1": ({"engine": "deepspeed"}, {"stage": 1}, "DeepSpeed ZeRO-1 over 1 process"),
    "fsdp2": ({"engine": "fsdp2", "world_size": 4}, None, "FSDP2 over 4 processes"),
    "fsdp2, gathered, offload": (
        {"engine": "fsdp2", "world_size": 4, "reshard_after_forward": False, "cpu_offload": True},
        None,
        "FSDP2 over 4 processes, weights stay gathered until the backward pass, CPU offload of shards and optimizer",
    ),
    "hsdp": (
        {"engine": "fsdp2", "world_size": 8, "dp_replicate": 2},
        None,
        "HSDP, 2 replicas of 4 processes each",
    ),
    "single": ({}, None, "single GPU"),
}


@pytest.mark.parametrize("way", STRATEGIES)
def test_engines_in_words(way):
    fields, zero, text = STRATEGIES[way]
    strategy = Strategy(**fields, ds_config=None if zero is None else {"zero_optimization": zero})
    assert words.engine(strategy) == text


@pytest.mark.parametrize(
    ("blocks", "total", "kind", "text"),
    [
        (0, 20, "full", "none: nothing is recomputed"),
        (12, 20, "full", "12 of 20 blocks recomputed in the backward pass"),
        ("all", 20, "full", "all 20 blocks recomputed in the backward pass"),
        (20, 20, "full", "all 20 blocks recomputed in the backward pass"),
        (3, None, "full", "the first 3 blocks recomputed in the backward pass"),
        (
            "all",
            None,
            "selective",
            "all blocks recomputed in the backward pass, except matrix products and attention",
        ),
    ],
)
def test_checkpointing_in_words(blocks, total, kind, text):
    assert words.checkpointing(Strategy(checkpointed_blocks=blocks, checkpointing=kind), total) == text


@pytest.mark.parametrize(
    ("blocks", "segments", "text"),
    [
        ("all", {"blocks": 2}, "all 20 blocks recomputed in the backward pass, 2 at once"),
        ("all", {"every": 2}, "10 of 20 blocks recomputed in the backward pass, 1 of every 2"),
        (14, {"blocks": 2, "every": 4}, "8 of 20 blocks recomputed in the backward pass, 2 of every 4 at once"),
    ],
)
def test_checkpointed_segments_in_words(blocks, segments, text):
    assert words.checkpointing(Strategy(checkpointed_blocks=blocks, checkpointed_segments=segments), 20) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.0042, 0.0061, "4.20–6.10 ms"),
        (28.4, 37.1, "28.4–37.1 s"),
        (90, 3700, "1.50–61.7 min"),
        (7200, 7201, "2.00 h"),
        (86_400 * 38.5, 86_400 * 50.3, "38.5–50.3 days"),
        (0.708, 2.341, "0.71–2.34 s"),
        (0, 2, "0.00–2.00 s"),
        (0, 0, "0.00 ms"),
    ],
)
def test_ranges_of_time_in_the_unit_of_their_middle(low, high, text):
    assert words.span(Interval(low=low, high=high)) == text


def test_largest_micro_batches_of_blocks_that_keep_a_part_say_so():
    made = plans.made_plan()
    kept = "blocks keep matrix products and attention; larger ones may fit if these are recomputed too"
    assert kept not in words.limited(made)
    chosen = made.chosen.model_copy(update={"strategy": plans.strategy(checkpointing="selective")})
    assert kept in words.limited(made.model_copy(update={"chosen": chosen}))


def test_what_takes_less_than_a_thousandth_of_the_step_is_less():
    made = plans.made_plan()
    parts = made.chosen.step.parts | {"copies": plans.interval(0, 0.02), "waits": plans.interval(0, 0)}
    step = made.chosen.step.model_copy(update={"parts": parts})
    text = plans.shown(made.model_copy(update={"chosen": made.chosen.model_copy(update={"step": step})}))
    assert "compute 26.0–32.2 s, memory 2.40–4.90 s, and smaller parts" in " ".join(text.split())


def test_what_is_below_one_has_two_figures():
    assert words.between(Interval(low=0.0951, high=0.4)) == "0.095–0.40"


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_ranges_of_bytes_name_their_unit_once_where_it_is_one(one, other):
    low, high = sorted((one, other))
    text = words.gibs(low, high)
    assert text.endswith(words.size(high))
    assert text.count("iB") + text.count(" B") == 1
    unit, _ = unit_of(high)
    assert float(text.split("–")[0].split()[0].replace(",", "")) == pytest.approx(low / unit, abs=0.51)
    assert words.size(low, like=high).split()[0] in text


def test_sizes_of_one_line_have_one_unit():
    assert words.size(27 * MIB, like=24 * GIB) == "0.03 GiB"
    assert words.gibs(135 * KIB, 1350 * KIB, like=1350 * KIB) == "0.13–1.32 MiB"
    assert words.gibs(135 * KIB, 200 * KIB, like=64 * KIB) == "135.00–200.00 KiB"
    assert words.size(1e16) == "9,313,226 GiB"
