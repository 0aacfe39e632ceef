"""Blocks with FP8 matrix products learn as others do, are refused where they cannot run, and are planned as they
run."""

import re

import pytest
import torch
from commands import in_process
from gpus import A40
from stepping import one_batch
from tiny_models import DIT, SANA

from bigdit import catalog, engines, models
from bigdit.errors import UserError
from bigdit.models.float8 import check_gpu, float8_notices
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.search.plan import Constraints
from bigdit.search.resolve import resolve_request
from bigdit.strategy import BatchShape, ControlNetSpec, LoraSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
FP8 = Strategy(float8="tensorwise")
H100 = catalog.gpu("h100-sxm")
IMAGES = BatchShape(latents=(4, 8, 8))


def wider(**kwargs):
    """A tiny Sana with these arguments, too."""
    return SANA.model_copy(update={"kwargs": SANA.kwargs | kwargs})


def losses(**printed):
    """The losses of five steps."""
    strategy = Strategy(**printed)
    family = models.family(SANA.class_name)
    model = models.build(wider(num_layers=4), device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    models.equip(model, family, strategy, backend="aot_eager")
    engine = engines.create(strategy, model, family, device=CPU)
    return [float(train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=1e-2).loss) for step in range(5)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_learns_as_bf16_does(recipe):
    """Within 1 %: FP8 has 3 bits, or 2. Recomputation and offload change nothing."""
    plain, fp8 = losses(), losses(float8=recipe)
    assert fp8 == pytest.approx(plain, rel=1e-2)
    assert all(one != other for one, other in zip(plain, fp8, strict=True))
    assert losses(float8=recipe, checkpointed_blocks=3, offload_activations=True) == fp8
    assert losses(float8=recipe, checkpointed_blocks=3, checkpointing="selective") == fp8


def test_adapters_stay_in_bf16_over_a_base_in_fp8():
    plain, fp8 = (losses(lora=LoraSpec(rank=16), float8=recipe) for recipe in ("none", "rowwise"))
    assert fp8 == pytest.approx(plain, rel=2e-2)
    assert fp8 != plain
    family, model = models.family(SANA.class_name), models.build(SANA, device="cpu", dtype=torch.bfloat16, seed=0)
    models.equip(model, family, Strategy(lora=LoraSpec(rank=16), float8="rowwise"))
    named = {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"}
    assert named
    assert not any("lora_" in name for name in named)


@pytest.mark.parametrize(
    ("spec", "count"), [(DIT, "18 of the 27"), (SANA, "16 of the 16"), (wider(num_attention_heads=3), "4 of the 16")]
)
def test_how_many_layers_multiply_in_fp8_is_logged(spec, count):
    """Those of modulation and time do not, nor those whose sizes 16 does not divide."""
    family, model, strategy = models.family(spec.class_name), models.skeleton(spec, dtype=torch.bfloat16), FP8
    names = [name for name, _ in model.named_parameters()]
    models.equip(model, family, strategy)
    (line,) = float8_notices(model, family, strategy)
    assert line.startswith(f"strategy.float8: {count} linear layers of the blocks multiply in FP8; a CPU only ")
    assert [name for name, _ in model.named_parameters()] == names


def test_blocks_without_a_layer_for_fp8_are_a_line():
    narrow = wider(num_attention_heads=3, num_cross_attention_heads=3, cross_attention_dim=24)
    family, model = models.family(narrow.class_name), models.skeleton(narrow, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="16 divides the sizes of none of the 16 linear layers"):
        models.equip(model, family, FP8)


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ({"engine": "deepspeed", "ds_config": {}}, "was not tried with DeepSpeed's flat partitions"),
        ({"precision": "fp16"}, "casts weights and activations of bf16, and precision is fp16; use precision bf16"),
        ({"lora": LoraSpec(base="int8")}, "was not tried with lora.base int8; set it to bf16"),
        ({"controlnet": ControlNetSpec(layers=1, base="nf4")}, "was not tried with controlnet.base nf4; set it"),
        ({"lora": LoraSpec(dora=True)}, "was not tried with lora.dora"),
        ({"lora": LoraSpec(), "blocks_to_swap": 3, "checkpointed_blocks": "all"}, "was not tried with blocks_to_swap"),
    ],
)
def test_what_was_not_tried_is_refused(printed, problem):
    with pytest.raises(ValueError, match=re.escape(f"float8 {problem}")):
        Strategy(float8="tensorwise", **printed)


def test_a_gpu_without_fp8_is_a_line(monkeypatch):
    """In a plan, in a profile, and in a run on its GPU."""
    without = "multiplies nothing in FP8 (compute capability 8.6), which needs 8.9 or more; "
    strategy = Strategy(float8="rowwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    for key, ask in (
        ("--fp8: ", lambda: resolve_request(model="sana-1600m", gpu="a40", fp8="rowwise")),
        ("strategy.float8 is rowwise, and ", lambda: request_for(catalog.model("sana-1600m"), A40, strategy)),
        ("strategy.float8 is rowwise, and ", lambda: check_gpu(strategy, torch.device("cuda"))),
    ):
        with pytest.raises(UserError, match=f"^{key}NVIDIA A40 {re.escape(without)}"):
            ask()


def test_plans_pin_fp8_alone_and_never_by_themselves():
    assert Constraints().float8 is None
    for recipe in ("tensorwise", "rowwise"):
        assert resolve_request(model="sana-1600m", gpu="rtx-4090", fp8=recipe).constraints.float8 == recipe
    for asked, problem in (
        ({"fp8": "e4m3"}, "--fp8 is 'e4m3', which is unknown; known: rowwise, tensorwise"),
        ({"fp8": "rowwise", "engine": "zero3"}, "float8 was not tried with DeepSpeed's flat partitions"),
        (
            {"fp8": "rowwise", "precision": "fp32"},
            "float8 casts weights and activations of bf16",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(problem)):
            resolve_request(model="sana-1600m", gpu="h100-sxm", **asked)


@pytest.mark.parametrize("given", [("--fp8",), ("--fp8", "--compile"), ("--fp8", "tensorwise")])
def test_the_option_alone_is_tensorwise(given):
    done = in_process("plan", "--model", "pixart-sigma-xl-2-512", "--gpu", "h100-sxm", "--engine", "zero2", *given)
    assert done.returncode == 1
    assert "--engine zero2, --fp8 tensorwise: " in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_an_emulated_gpu_counts_what_fp8_takes():
    """The recorded step takes the bytes of one that is not recorded. Products are in FP8, and so are gathered
    weights."""
    sharded = {"engine": "fsdp2", "world_size": 4}
    asked = {
        name: StepRequest(model=DIT, batch=IMAGES, strategy=Strategy(**printed))
        for name, printed in {
            "bf16": sharded,
            "tensorwise": sharded | {"float8": "tensorwise"},
            "alone": {"float8": "rowwise"},
        }.items()
    }
    found = {}
    with EmulatedGpus(H100, 1) as gpus:
        for name, request in asked.items():
            found[name] = gpus.attempt(request, counted="step")
            assert {each.phase: each.peak_bytes for each in gpus.profile(request).ledger.phases} == found[name].peaks
    assert products_in_fp8(found["bf16"]) == 0
    for name in ("tensorwise", "alone"):
        assert products_in_fp8(found[name]) > 0.4, name
    assert gathered_bytes(found["tensorwise"]) < gathered_bytes(found["bf16"])


def products_in_fp8(attempt):
    """The share of FLOPs."""
    every = attempt.work.operators
    return sum(each.flops for each in every if each.dtype.startswith("float8")) / sum(each.flops for each in every)


def gathered_bytes(attempt):
    return sum(each.nbytes for each in attempt.work.collectives if each.name == "all_gather")
