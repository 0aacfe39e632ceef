"""What bigdit is held against does the same work: the same losses, the same samples, the same state."""

import itertools
from contextlib import closing

import pytest
import torch
from commands import DIGITS, SINGLE, TINY
from stores import STREAMS, TOKENS, make_store, stream_of

from bigdit import engines, models
from bigdit.bench.interleaved import Load
from bigdit.bench.loader import data_loader, places
from bigdit.bench.optimizer import BASELINE, NAMES, bench_optimizers, check_room, contestants, shapes_of
from bigdit.bench.plain_loop import plain_steps
from bigdit.bench.step import bench_step
from bigdit.config import load_run
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.steps import batch
from bigdit.spec import BatchShape, EmaSpec, OptimizerSpec
from bigdit.store import FeatureStore
from bigdit.store.text import TEXT
from bigdit.train.prepare import prepare
from bigdit.train.step import train_step

SHAPE = BatchShape(latents=(4, 4, 4), text=(8, 64))


def asked(**changed):
    spec, strategy = prepare(load_run(DIGITS, [*TINY, *SINGLE]), 1)
    return spec, strategy.model_copy(update={"optimizer": OptimizerSpec(lr=1e-2)} | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "grad_accum_steps": 2, "gradient_clipping": 0.01, "ema": EmaSpec()},
        {"precision": "fp16", "gradient_clipping": None},
        {"precision": "bf16_sr", "checkpointed_blocks": "all"},
    ],
    ids=lambda changed: changed["precision"],
)
def test_the_plain_loop_trains_as_the_engine_does(changed):
    spec, strategy = asked(**changed)
    family, dtype = models.family(spec.class_name), engines.compute_dtype(strategy)
    plain, own = (models.build(spec, device="cpu", dtype=dtype, seed=0) for _ in range(2))
    for model in (plain, own):
        models.equip(model, family, strategy)
    micro_batches = [batch(SHAPE, strategy)] * strategy.grad_accum_steps
    steps = plain_steps(plain, family, strategy, FlowMatchingSpec(), lambda: micro_batches, torch.device("cpu"))
    engine = engines.create(strategy, own, family, device=torch.device("cpu"), world=World())
    torch.manual_seed(0)  # of stochastic rounding
    found = [next(steps).loss for _ in range(3)]
    torch.manual_seed(0)
    expected = [float(train_step(engine, family, FlowMatchingSpec(), micro_batches, lr=1e-2).loss) for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[2] < 0.999 * found[0]  # and it is training


def test_a_step_without_room_for_a_second_model_is_timed_alone(monkeypatch):
    spec, strategy = asked(precision="fp32")
    monkeypatch.setattr("bigdit.bench.step.room", lambda device: (1 << 20, 1 << 30))
    found = bench_step(spec, SHAPE, strategy, FlowMatchingSpec(), steps=3, seed=0)
    assert found.compared is None
    assert found.alone.endswith("1.00 MiB are free; take a smaller micro-batch")
    assert found.alone.startswith("it takes about ")
    assert found.receipt.steps == 3


@pytest.mark.parametrize(
    "kind",
    [{}, {"pooled": True, "several": True}, {"eight_bits": True}, {"classes": 5}, {"streams": True}],
    ids=str,
)
def test_torchs_data_loader_gives_the_batches_of_ours(tmp_path, kind):
    make_store(tmp_path / "store", **kind)
    run = load_run(DIGITS, [*TINY, *SINGLE, f"data.features={tmp_path / 'store'}", "data.read_threads=1"])
    stream = stream_of(FeatureStore.open(tmp_path / "store"))
    more = {name: each["max_tokens"] for name, each in STREAMS.items()} if "streams" in kind else {}
    tokens = {} if "classes" in kind else {TEXT: TOKENS, **more}
    theirs = data_loader(run.data, (places(stream, step) for step in range(9)), tokens, pinned=False)
    with closing(stream.steps(0, 9)) as ours:
        for own, other in itertools.zip_longest(ours, theirs):
            expected = own[0].tensors()
            assert len(expected) == len(other)
            assert all(torch.equal(*pair) for pair in zip(expected, other, strict=True))


def test_optimizers_keep_what_they_are_known_to_keep():
    shapes = [torch.Size([256, 128]), torch.Size([128, 64, 1, 1]), torch.Size([300])]
    found = bench_optimizers(contestants([], shapes), shapes, "three", rounds=1, load=Load.now())
    kept = {each.name: each.state_bytes for each in found.contenders}
    assert next(iter(kept)) == BASELINE
    assert kept[BASELINE] == kept["AdamW, for-loop"] == pytest.approx(8, abs=0.001)
    assert 2.03 < kept["adamw_8bit"] < 2.3
    assert 4 < kept["came"] < 4.2
    assert kept["adafactor"] < 0.1
    assert set(kept) | {"adamw", "paged_adamw_8bit"} == {*NAMES, BASELINE, "AdamW, for-loop"}
    assert found.notes[0].startswith("left out: paged_adamw_8bit: optimizer.name paged_adamw_8bit keeps its state in")


def test_what_optimizers_take_is_known_before_they_take_it(monkeypatch):
    spec, _ = asked()
    shapes = shapes_of(spec)
    few, all_of_them = contestants(["came"], shapes), contestants([], shapes)
    elements = sum(shape.numel() for shape in shapes)
    assert (8 + 8 + 8 + 4) * elements < few.bytes_for(shapes) < all_of_them.bytes_for(shapes)
    check_room(few, shapes, "tiny", lambda free: "")
    monkeypatch.setattr("bigdit.bench.optimizer.room", lambda device: (1000, 2000))
    with pytest.raises(UserError, match=r"tiny: 3 optimizers side by side take up to \d+ bytes \(.*\), and 1000 "):
        check_room(few, shapes, "tiny", lambda free: "")


def test_no_optimizer_is_timed_on_an_emulated_card(monkeypatch):
    monkeypatch.setattr("bigdit.bench.optimizer.on_emulated_card", lambda: True)
    with pytest.raises(UserError, match="times a card's kernels, and on an emulated card none runs; use a real one"):
        contestants([], [torch.Size([8])])
