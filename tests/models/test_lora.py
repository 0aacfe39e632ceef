"""Adapters over a frozen base: what is trained and quantised, how it is saved, and how diffusers reads it."""

from __future__ import annotations

import diffusers
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from commands import DIGITS, SINGLE
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from stepping import equipped, one_batch
from training import exported, run_to
from two_processes import answer_of_two
from whole import full_weights

from bigdit import engines, models
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.models.lora import dequantised, quantised
from bigdit.models.lora_files import FILE as ADAPTERS
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.sampling import Sampler
from bigdit.strategy import LoraSpec, OptimizerSpec, Strategy
from bigdit.train.prepare import prepare
from bigdit.train.step import train_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("base", ["bf16", "int8", "fp8", "nf4"])
def test_adapters_learn_and_the_base_stays(base):
    strategy = Strategy(lora=LoraSpec(rank=4, base=base), optimizer=OptimizerSpec(lr=1e-2))
    family, model = equipped(strategy)
    engine = engines.create(strategy, model, family, device=CPU)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = [train_step(engine, family, FlowMatchingSpec(), [one_batch()], lr=1e-2).loss.item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    weights = full_weights(engine)
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    # Self- and cross-attention of each block: query, key, value and output, two matrices each.
    assert len(weights) == len(family.blocks(model)) * 2 * 4 * 2
    assert all(weight.abs().max() > 0 for weight in weights.values())
    assert all(master.dtype == torch.float32 for master in engine.masters)
    linears = {p.dtype for name, p in model.named_parameters() if name.endswith("base_layer.weight")}
    dtypes = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "nf4": torch.uint8}
    assert linears == {dtypes[base]}


def unpacked(layer):
    """The weight that a layer computes with."""
    if layer.weight.dtype == torch.uint8:
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.weight if layer.weight.dtype == torch.bfloat16 else dequantised(layer.weight, layer.scale)


@pytest.mark.parametrize("base", ["bf16", "int8", "fp8", "nf4"])
def test_magnitudes_learn_next_to_the_adapters_and_start_as_the_base(base):
    """A magnitude for each row of an adapted weight, also outside the blocks, where no weight is quantised. With
    adapters of zero the prediction is the base's."""
    targets = ("*.attn?.to_*", "proj_out")
    plain, dora = (
        Strategy(lora=LoraSpec(rank=4, base=base, dora=dora, targets=targets), optimizer=OptimizerSpec(lr=1e-2))
        for dora in (False, True)
    )
    predictions, batch = [], one_batch().to(CPU, torch.bfloat16)
    for strategy in (plain, dora):
        family, model = equipped(strategy)
        engine = engines.create(strategy, model, family, device=CPU)
        predictions.append(family.predict(engine.model, batch.latents.bfloat16(), torch.tensor([0.2, 0.7]), batch))
    torch.testing.assert_close(*predictions, rtol=0.02, atol=0.02)  # for norms that are rounded to bf16
    before = {
        name: weight.clone() for name, weight in full_weights(engine).items() if ".lora_magnitude_vector." in name
    }
    losses = [train_step(engine, family, FlowMatchingSpec(), [one_batch()], lr=1e-2).loss.item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    after = full_weights(engine)
    assert len(before) == len(after) // 3 == len(family.blocks(model)) * 2 * 4 + 1
    for name, weight in before.items():
        layer = model.get_submodule(name.split(".lora_")[0]).get_base_layer()
        rows = unpacked(layer).float().norm(dim=1)
        torch.testing.assert_close(weight, rows, rtol=2**-7 if base == "int8" else 2**-8, atol=0)  # rows of 32
        assert not torch.equal(after[name], weight)


@pytest.mark.parametrize("recomputed", [0, "all"])
@pytest.mark.parametrize("base", ["int8", "fp8", "nf4"])
def test_a_quantised_base_has_nearly_the_same_predictions_and_gradients(base, recomputed):
    """The error of int8 is at most 1/254 of a row's largest weight, that of fp8 1/16 of each weight, that of nf4 1/7
    of the largest of 64."""
    most = {"int8": 0.02, "fp8": 0.05, "nf4": 0.15}[base]
    predictions, gradients = [], []
    for kept in ("bf16", base):
        strategy = Strategy(lora=LoraSpec(base=kept), checkpointed_blocks=recomputed)
        family, model = equipped(strategy)
        engine = engines.create(strategy, model, family, device=CPU)
        batch = one_batch().to(CPU, torch.bfloat16)
        latents = batch.latents.bfloat16()
        predictions.append(family.predict(engine.model, latents, torch.tensor([0.2, 0.7]), batch).float())
        predictions[-1].square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters() if p.requires_grad]))
    for exact, found in (predictions, gradients):
        assert 0 < (found - exact).norm() / exact.norm() < most


def test_adapters_start_from_the_seed_alone():
    """Every process draws the same, whatever it drew before. The first prediction is the base's."""
    strategy = Strategy(lora=LoraSpec())
    (_, one), (_, same), (_, other) = equipped(strategy, seed=3), equipped(strategy, seed=3), equipped(strategy, seed=4)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (".lora_A." not in name)
        assert ".lora_B." not in name or not a.any()


@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_trains_the_largest_part_of_each_weight_and_begins_as_the_model(rslora):
    """As peft's own does, with exact singular vectors."""
    lora = {"rank": 4, "alpha": 2, "rslora": rslora}
    (family, model), (_, plain), (_, own) = (
        equipped(Strategy(lora=LoraSpec(**lora, pissa=pissa), precision="bf16")) for pissa in (True, False, False)
    )
    batch = one_batch().to(CPU, torch.bfloat16)
    inputs = batch.latents.bfloat16(), torch.tensor([0.2, 0.7]), batch
    found, wanted = (family.predict(each, *inputs).float() for each in (model, plain))
    assert torch.dist(found, wanted) < 0.02 * wanted.norm()
    for name, layer in own.named_modules():
        if isinstance(layer, LoraLayer):
            mine, before = model.get_submodule(name), layer.get_base_layer().weight.clone()
            layer.pissa_init("default", "pissa")
            left = mine.get_base_layer().weight, layer.get_base_layer().weight
            assert (left[0] - left[1]).norm() < 0.02 * (before - left[1]).norm()
            down, up = (getattr(mine, f"lora_{kind}")["default"].weight for kind in "AB")
            assert torch.dist(before - left[0], mine.scaling["default"] * up @ down) < 0.02 * before.norm()
    with pytest.raises(ValueError, match="pissa is for LoRA, and kind is loha; set one of them to its default"):
        LoraSpec(kind="loha", pissa=True)
    with pytest.raises(UserError, match=r"strategy\.lora\.pissa starts from the weights below; set it to false"):
        models.start_adapters(model, LoraSpec(pissa=True), {})


def test_targets_are_named_by_their_last_parts():
    _, model = equipped(Strategy(lora=LoraSpec(targets=("to_q", "to_out.0"))))
    adapted = {name.split(".lora_A")[0] for name, p in model.named_parameters() if "lora_A" in name}
    assert {name.split(".", 3)[3] for name in adapted} == {"to_q", "to_out.0"}
    with pytest.raises(UserError, match=r"lora\.targets: no linear layer's name ends in 'to_w'; .*to_"):
        equipped(Strategy(lora=LoraSpec(targets=("to_w",))))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"lora\.base bf16 computes in bf16, and precision is fp32"):
        Strategy(lora=LoraSpec(), precision="fp32")
    for base, engine in (("nf4", "fsdp2"), ("nf4", "deepspeed"), ("int8", "deepspeed")):
        with pytest.raises(ValueError, match=rf"lora\.base {base} keeps packed weights, which {engine} cannot shard"):
            Strategy(lora=LoraSpec(base=base), engine=engine, ds_config={})
    run = load_run(DIGITS, ["strategy.lora.rank=4", "strategy.precision=bf16", *SINGLE])
    with pytest.raises(UserError, match=r"strategy\.lora adapts trained weights, and model\.init_from is missing"):
        prepare(run)


KINDS = ("base=nf4", "dora=true", "base=int8 dora=true", "rslora=true", "kind=lokr base=int8", "kind=loha")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "pissa=true base=int8"])
def test_adapters_are_trained_kept_resumed_and_read_by_diffusers(tmp_path, features, trained, kind):
    base = trained / "exports/step-00000008/transformer"
    chosen = [f"strategy.lora.{each}" for each in kind.split()]
    settings = ("strategy.lora.rank=4", "strategy.lora.alpha=8", *chosen, "strategy.ema.decay=0.5")
    settings = (
        *settings,
        f"model.init_from={base}",
        "train.checkpoint_every=2",
        "strategy.checkpointed_blocks=all",
        "strategy.optimizer.lr=0.05",
    )
    straight = run_to(4, tmp_path / "straight", features, *settings)
    run_to(2, tmp_path / "resumed", features, *settings)
    resumed = run_to(4, tmp_path / "resumed", features, *settings)
    for folder in ("transformer", "transformer_ema"):
        one, other = exported(straight, folder), exported(resumed, folder)
        assert all(torch.equal(one[name], other[name]) for name in one)
        prefix = "base_model.model" if "kind=" in kind else "transformer"
        assert all(name.startswith(f"{prefix}.transformer_blocks.") for name in one)
    with pytest.raises(UserError) as refused:
        run_to(6, tmp_path / "resumed", features, *settings, "strategy.lora.rank=2")
    elsewhere = "choose another output" if "kind=" in kind or "pissa" in kind else "starts from these adapters"
    assert str(refused.value).endswith(elsewhere)

    adapters = straight.folder.parents[1] / "exports/step-00000004/transformer"
    plain, adapted = (as_kept(base, kind) for _ in range(2))
    if "kind=" in kind:
        adapted = PeftModel.from_pretrained(adapted, adapters).base_model.model
    else:
        adapted.load_lora_adapter(load_file(adapters / ADAPTERS))  # without metadata: the weights contain alpha / rank
    shape, dim = (plain.config.in_channels, 8, 8), plain.config.caption_channels
    inputs = {
        "hidden_states": torch.randn(1, *shape),
        "encoder_hidden_states": torch.randn(1, 5, dim),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 5),
        "return_dict": False,
    }
    with torch.no_grad():
        drawn = Sampler(straight, CPU).model().float()
        found, wanted, without = (model(**inputs)[0] for model in (drawn, adapted, plain))
    assert (found - wanted).norm() < 0.05 * (found - without).norm()


@pytest.mark.slow
def test_other_adapters_start_from_these_elsewhere(tmp_path, features, trained, capsys):
    """The error says what works instead. Adapters alone are no weights to start from."""
    base = trained / "exports/step-00000008/transformer"
    settings = ("strategy.lora={rank: 4, alpha: 8}", f"model.init_from={base}", "train.checkpoint_every=2")
    found = run_to(2, tmp_path / "run", features, *settings)
    for key, before, asked in (
        ("lora.rank", "4", "8"),
        ("lora.alpha", "8.0", "2.0"),
        ("lora.targets", "[]", '["to_q"]'),
        ("lora.dora", "false", "true"),
        ("lora.base", "bf16", "nf4"),
    ):
        with pytest.raises(UserError) as refused:
            run_to(4, tmp_path / "run", features, *settings, f"strategy.{key}={asked}")
        assert str(refused.value) == (
            f"{found.folder} was trained with strategy.{key} {before}, and the run asks for {asked}; "
            f"choose another output; there model.init_from={base} model.lora_from={found.folder} starts from these "
            "adapters"
        )
    export, other = tmp_path / "run/exports/step-00000002/transformer", "strategy.lora={rank: 8, alpha: 2}"
    still = ("strategy.optimizer.lr=1e-12", f"model.lora_from={export}")
    ended = exported(run_to(2, tmp_path / "elsewhere", features, *settings, other, *still), "transformer")
    before = exported(found, "transformer")
    for up in (name for name in before if ".lora_B." in name):
        change, was = (each[up] @ each[up.replace("lora_B", "lora_A")] for each in (ended, before))
        torch.testing.assert_close(change, was, atol=2e-2 * was.abs().max().item(), rtol=0)  # bf16
    assert "note: model.lora_from: 16 layers start from it" in capsys.readouterr().err
    within = {each: each for each in (found.folder, export, export.parent)} | {tmp_path / "run": found.folder}
    for source, named in within.items():
        fix = f"set model.init_from to the weights they are for.* and model.lora_from to {named}$"
        with pytest.raises(UserError, match=f"^model.init_from: {named} holds only LoRA adapters; {fix}"):
            run_to(2, tmp_path / "other", features, *settings, f"model.init_from={source}")
    whole = (
        f"^model.init_from: {trained} is the output of a run; name a checkpoint of it, such as {trained}/checkpoints/"
    )
    with pytest.raises(UserError, match=whole):
        run_to(2, tmp_path / "other", features, *settings, f"model.init_from={trained}")
    for source, named in ((trained, trained / "checkpoints/step-00000008"), (base, base), (base.parent, base)):
        with pytest.raises(UserError, match=rf"it holds no LoRA, but a whole model; name {named} in model\.init_from$"):
            run_to(2, tmp_path / "other", features, *settings, f"model.lora_from={source}")
    run_to(2, tmp_path / "lokr", features, "strategy.lora={kind: lokr, rank: 4}", *settings[1:])
    with pytest.raises(UserError, match=r"its tensor \S+lokr_w1\S* is of LoKr, and LoRA was expected"):
        run_to(2, tmp_path / "other", features, *settings, f"model.lora_from={tmp_path / 'lokr/exports/step-00000002'}")
    with pytest.raises(UserError, match=rf"^model.lora_from: {tmp_path}/lokr: it is of LoKr, and LoRA was expected"):
        run_to(2, tmp_path / "other", features, *settings, f"model.lora_from={tmp_path / 'lokr'}")
    for held in ("lokr", "lokr/checkpoints/step-00000002", "lokr/exports/step-00000002/transformer"):
        with pytest.raises(UserError, match=r"holds only LoKr adapters; merge them into the weights they are for"):
            run_to(2, tmp_path / "other", features, *settings, f"model.init_from={tmp_path / held}")
    lacks = f"model.lora_from: {found.folder}: it adapts .*, and strategy.lora.targets leaves that out"
    with pytest.raises(UserError, match=lacks):
        run_to(
            2,
            tmp_path / "other",
            features,
            *settings,
            f"model.lora_from={found.folder}",
            "strategy.lora.targets=[to_k]",
        )
    with pytest.raises(UserError, match=rf"it holds no pytorch\S+; name a checkpoint of it, such as {found.folder}$"):
        run_to(2, tmp_path / "other", features, *settings, f"model.lora_from={tmp_path / 'run'}")
    (tmp_path / "model.gguf").touch()
    what = r"model.lora_from: .*: model.gguf is a GGUF file, .* take the .safetensors of it"
    with pytest.raises(UserError, match=what):
        run_to(2, tmp_path / "other", features, *settings, f"model.lora_from={tmp_path / 'model.gguf'}")


def as_kept(folder, kind):
    """diffusers' model with the run's base weights: rounded, or packed and unpacked."""
    model = diffusers.SanaTransformer2DModel.from_pretrained(folder).bfloat16().float()
    packed = next((each.partition("=")[2] for each in kind.split() if each.startswith("base=")), None)
    for linear in (each for each in model.transformer_blocks.modules() if isinstance(each, torch.nn.Linear)):
        weight = linear.weight.data
        if packed == "nf4":
            weight = dequantize_4bit(*quantize_4bit(weight, compress_statistics=False, quant_type="nf4"))
        if packed == "int8":
            weight = dequantised(*quantised(weight.bfloat16(), torch.int8))
        linear.weight.data = weight.float()
    return model


# Two processes: each engine trains the adapters alone, and equals one process up to bf16's rounding.
_SHARDED = """
import json, sys
import torch, torch.distributed as dist
from stepping import equipped, one_batch
from whole import full_weights
from bigdit import engines, models
from bigdit.dist import world_from_env
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import LoraSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
whole = one_batch()
at = slice(world.rank, world.rank + 1)
mine = Batch(whole.latents[at], whole.text_embeds[at], whole.text_mask[at], whole.seeds[at])
document = json.load(open("ds_configs/zero2_bf16.json"))
document |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
document |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
stages = {f"zero{n}": document | {"zero_optimization": document["zero_optimization"] | {"stage": n}} for n in (2, 3)}
cases = {"fsdp2": None, "fsdp2-dora": None, "fsdp2-int8": None} | stages | {"zero3-dora": stages["zero3"]}
cases |= {"fsdp2-lokr": None, "fsdp2-loha": None, "zero3-lokr": stages["zero3"], "zero2-loha": stages["zero2"]}
found = {}
KINDS = {"": {}, "dora": {"dora": True}, "int8": {"base": "int8"}, "lokr": {"kind": "lokr"}, "loha": {"kind": "loha"}}
for name, ds_config in cases.items():
    strategy = Strategy(
        engine="deepspeed" if ds_config else "fsdp2",
        world_size=2,
        ds_config=ds_config,
        gradient_clipping=None,
        lora=LoraSpec(rank=4, **KINDS[name.partition("-")[2]]),
        optimizer=OptimizerSpec(lr=1e-2),
        checkpointed_blocks="all",
    )
    family, model = equipped(strategy)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    losses = []
    for _ in range(4):
        loss = train_step(engine, family, FlowMatchingSpec(), [mine], lr=1e-2).loss.float()
        dist.all_reduce(loss)
        losses.append(loss.item() / 2)
    found[name] = {"losses": losses, "names": list(full_weights(engine))}
if world.is_main:
    json.dump(found, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_engines_train_the_same_adapters(tmp_path):
    answer = answer_of_two(_SHARDED, tmp_path)
    alone, plain = {}, {"": {}, "dora": {"dora": True}, "int8": {"base": "int8"}}
    for kind, spec in (plain | {each: {"kind": each} for each in ("lokr", "loha")}).items():
        strategy = Strategy(lora=LoraSpec(rank=4, **spec), optimizer=OptimizerSpec(lr=1e-2), gradient_clipping=None)
        family, model = equipped(strategy)
        engine = engines.create(strategy, model, family, device=CPU)
        steps = [train_step(engine, family, FlowMatchingSpec(), [one_batch()], lr=1e-2).loss.item() for _ in range(4)]
        alone[kind] = steps, list(full_weights(engine))
    for name, found in answer.items():
        losses, names = alone[name.partition("-")[2]]
        assert found["losses"] == pytest.approx(losses, rel=3e-3)  # engines/test_curves.py says why
        assert found["names"] == names


@pytest.mark.parametrize(
    ("class_name", "pipeline", "loader"),
    [
        ("SanaTransformer2DModel", "SanaPipeline", "SanaPipeline's load_lora_weights"),
        ("HunyuanVideo15Transformer3DModel", "HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel's load_"),
        ("PRXTransformer2DModel", "PRXPipeline", None),  # its load_lora_weights is for a U-Net
        ("PaperDiT", None, None),
    ],
)
def test_what_of_diffusers_loads_adapters_is_known(class_name, pipeline, loader):
    found = models.loaded_by(class_name, pipeline)
    assert found is None if loader is None else found.startswith(loader)
