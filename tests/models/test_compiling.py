"""Compiled blocks learn as others do, share their graphs, and are planned as they run."""

import os
from pathlib import Path

import pytest
import torch
import torch._dynamo
from commands import HELPERS, ROOT, run_ranks
from gpus import memory
from stepping import one_batch
from tiny_models import DIT, SANA, SHAPE, WAN
from torch._dynamo.utils import counters

from bigdit import catalog, engines, models
from bigdit.errors import UserError
from bigdit.models.equip import CompiledGraphs, compile_blocks, compile_errors
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.record.costs import COMPILED
from bigdit.strategy import BatchShape, LoraSpec, ModelSpec, SegmentSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
Z_IMAGE = ModelSpec(  # it reads the texts' lengths from their mask
    name="tiny-z-image",
    class_name="ZImageTransformer2DModel",
    kwargs={"in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    | {"cap_feat_dim": 12, "axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16]},
)
FOUR_BLOCKS = SANA.model_copy(update={"kwargs": SANA.kwargs | {"num_layers": 4}})
# All layers between a model and its compiled blocks. `aot_eager` makes Inductor's graphs without kernels.
AROUND = {"precision": "fp32", "checkpointed_blocks": 2, "offload_activations": True, "lora": LoraSpec(rank=2)}
AROUND["checkpointed_segments"] = SegmentSpec(blocks=2)


def losses(strategy, spec=FOUR_BLOCKS):
    """The losses of three steps."""
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    models.equip(model, family, strategy, backend="aot_eager")
    engine = engines.create(strategy, model, family, device=CPU)
    return [float(train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=1e-2).loss) for step in range(3)]


@pytest.fixture
def counted():
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("printed", "graphs"),
    [
        ({}, 2),
        (AROUND | {"precision": "bf16"}, 2),
        ({"precision": "bf16", "lora": LoraSpec(rank=2, base="int8")}, 2),
        ({"precision": "bf16", "lora": LoraSpec(rank=2, base="nf4")}, 4),  # without a gradient it is another product
    ],
    ids=["alone", "all of it", "int8", "nf4"],
)
def test_compiled_blocks_learn_as_others_do_and_share_their_graphs(printed, graphs, counted):
    """Up to the rounding of sums in another order. Four blocks have two graphs: the first block gets images with
    other strides than those that a block returns."""
    printed = {"precision": "fp32"} | printed
    plain = losses(Strategy(**printed))
    assert counted["unique_graphs"] == 0
    assert losses(Strategy(compile_blocks=True, **printed)) == pytest.approx(plain, rel=1e-5)
    assert counted["unique_graphs"] == graphs


@pytest.fixture(scope="module")
def gpus(own_cache, tmp_path_factory):
    """One GPU, and an empty folder for what is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("traced")))
        with EmulatedGpus(catalog.gpu("h100-sxm"), 1) as found:
            yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shape", "more"),
    [(DIT, BatchShape(latents=(4, 8, 8)), {"offload_activations": True}), (SANA, SHAPE, {}), (Z_IMAGE, SHAPE, {})],
    ids=["slices in CPU memory", "convolutions and masks", "lengths of texts"],
)
def test_a_plan_runs_compiled_blocks(gpus, spec, shape, more):
    """With a third fewer kernels. The recorded step takes the bytes of one that is not recorded."""
    plain, compiled = (
        StepRequest(model=spec, batch=shape, strategy=Strategy(compile_blocks=switch, **more))
        for switch in (False, True)
    )
    one, other = (gpus.attempt(each, counted="step") for each in (plain, compiled))
    ledger = gpus.profile(compiled).ledger
    assert 3 * kernels(other) <= 2 * kernels(one)
    assert on_host(other) <= on_host(one)  # what the emulated GPU does for a kernel is no part of a step
    assert COMPILED in {each.operator for each in other.work.operators}  # also after a plain step of the same model
    assert 0.9 * flops(one) < flops(other) <= flops(one)  # the smallest products are in kernels with several operators
    assert {each.phase: each.peak_bytes for each in ledger.phases} == {
        name: each.peak_bytes for name, each in other.phases.items()
    }


@pytest.mark.slow
def test_traces_are_kept_for_equal_blocks_of_one_size(gpus):
    """They change no byte, kernel or count. Other settings of the step take them. A damaged file is written anew."""
    request = StepRequest(model=SANA, batch=SHAPE, strategy=Strategy(compile_blocks=True, micro_batch_size=3))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "traces")
    before = {*folder.glob("*/*")}
    traced = same(gpus.attempt(request, counted="step"))
    (file,) = {*folder.glob("*/*")} - before
    written, data = file.stat(), bytearray(file.read_bytes())
    assert traced == same(gpus.attempt(request, 2**40, counted="step"))
    other = Strategy(compile_blocks=True, micro_batch_size=3, gradient_clipping=None, checkpointed_blocks="all")
    gpus.attempt(request.model_copy(update={"strategy": other}))
    assert file.stat() == written  # nothing was traced
    data[100] ^= 1
    file.write_bytes(data)
    assert traced == same(gpus.attempt(request, 2**41, counted="step"))
    assert file.read_bytes() != data


def same(attempt):
    return memory(attempt), attempt.launched, attempt.packed_work


@pytest.mark.slow
def test_what_is_traced_of_attention_over_processes_and_of_fp8_is_kept(gpus):
    """By itself torch keeps only kernels: each attempt would trace again, of FP8 also the code that calls them. Three
    blocks have two graphs."""
    traced = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    before = {*traced.glob("aotautograd/*")}
    shared = {"engine": "fsdp2", "world_size": 2, "cp": 2, "micro_batch_size": 2}
    strategy = Strategy(**shared, compile_blocks=True, float8="rowwise")
    blocks = WAN.model_copy(update={"kwargs": WAN.kwargs | {"num_layers": 3}})
    shape = BatchShape(latents=(4, 2, 8, 8), text=(6, 12))
    gpus.attempt(StepRequest(model=blocks, batch=shape, strategy=strategy))
    assert len({*traced.glob("aotautograd/*")} - before) == 2


def kernels(attempt):
    return sum(each.launches for each in attempt.launched.values())


def on_host(attempt):
    return sum(each.calls for each in attempt.work.operators if each.place == "host")


def flops(attempt):
    return sum(each.flops for each in attempt.work.operators)


def test_a_block_that_cannot_be_compiled_is_a_line():
    done = run_ranks(1, ROOT / "tests/models/broken_compiler.py", PYTHONPATH=HELPERS)
    (line,) = done.stdout.splitlines()
    assert line.startswith("strategy.compile_blocks: torch cannot compile a block: ")
    assert "no compiler" in line
    assert line.endswith("; leave compile_blocks out")


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (
            {"engine": "deepspeed", "ds_config": {"zero_optimization": {"stage": 3}}},
            "compile_blocks cannot compile ZeRO-3's hooks within blocks; use engine fsdp2, or ZeRO-2",
        ),
        (
            {"checkpointing": "selective", "checkpointed_blocks": 1},
            "compile_blocks makes one kernel of several operators, and checkpointing selective keeps the outputs of "
            "single ones; use checkpointing full",
        ),
        ({"lora": LoraSpec(dora=True)}, "compile_blocks compiles the layers of lora.dora in pieces"),
    ],
)
def test_what_was_not_tried_is_refused(printed, problem):
    with pytest.raises(ValueError, match="compile_blocks") as refused:
        Strategy(compile_blocks=True, **printed)
    assert problem in str(refused.value)


@pytest.mark.usefixtures("counted")
def test_graphs_that_a_run_should_not_need_are_lines():
    """A size has its graphs once. More of them, and breaks within a block, cost speed that nobody would notice."""

    def block(x, factor):
        if factor == 4:
            torch._dynamo.graph_break()
        return x * factor

    compiled, graphs = (
        torch.compile(block, backend="eager", dynamic=False),
        CompiledGraphs(Strategy(compile_blocks=True)),
    )

    def step(done, factor):
        graphs.begin()
        compiled(torch.ones(2), factor)
        return graphs.lines(done, [(2,)])

    assert step(1, 2) == ["step 1: compiled 1 graph for 1 new size"]
    assert step(2, 2) == []
    more = "compiled 1 more graph for known sizes, which takes time; see TORCH_LOGS=recompiles"
    assert step(3, 3) == [f"step 3: {more}"]
    broken, last = step(4, 4)
    assert broken.startswith("a block is compiled in pieces, which costs speed: ")
    assert last == f"step 4: {more}"


def test_a_shape_that_cannot_be_compiled_is_named():
    named = r"cannot compile a block: RuntimeError: shape '\[7\]' is invalid for input of size"
    with pytest.raises(UserError, match=named), compile_errors():
        torch.compile(lambda x: x.reshape(7), backend="eager")(torch.ones(2))


def test_a_compiler_that_is_switched_off_is_a_line(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    family = models.family(SANA.class_name)
    with pytest.raises(UserError, match=r"TORCHDYNAMO_DISABLE is 1; unset it, or leave compile_blocks out"):
        compile_blocks(models.skeleton(SANA, dtype=torch.float32), family)
