"""The EMA of the weights: its recurrence, its shards, and its checkpoints."""

from __future__ import annotations

import pytest
import torch
from stepping import one_batch, started
from tiny_models import SANA as MODEL
from tiny_models import SHAPE
from training import exported, run_to
from two_processes import answer_of_two
from whole import full_weights

from bigdit import checkpoint, engines, models
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.sampling import Sampler
from bigdit.strategy import EmaSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

DECAY = 0.9

# An EMA's step is one fp32 operation away from the recurrence in fp64: half a unit in the last place of the largest
# weights (about 1). Older errors fade with the decay: 0.5 · 2⁻²³ / (1 − 0.9) < 1e-6.
TOLERANCE = {"rtol": 0, "atol": 1e-6}


GAMMA = 6.94  # of a width of 0.1, as in §3.1 of arXiv:2312.02696


def kept(spec, step):
    """The decay of this step (from 1)."""
    return min(spec.decay, (1 + step) / (10 + step)) if spec.power is None else (1 - 1 / step) ** (GAMMA + 1)


def averaged(strategy, steps=6):
    """(the engine's EMA, the recurrence in fp64) after a few steps, by parameter."""
    family = models.family(MODEL.class_name)
    model = models.build(MODEL, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    ema = engines.ema_of(engine)
    expected = {name: weight.double() for name, weight in full_weights(engine).items()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        latents = torch.randn(2, *SHAPE.latents, generator=generator)
        text = torch.randn(2, *SHAPE.text, generator=generator)
        batch = Batch(latents, text, torch.ones(2, SHAPE.text[0]), (1, 2))
        train_step(engine, family, FlowMatchingSpec(), [batch], lr=1e-2, ema=ema)
        for name, weight in full_weights(engine).items():
            share = 1 - kept(strategy.ema, step)
            expected[name] = (1 - share) * expected[name] + share * weight.double()
    return full_weights(engine, ema), expected


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ema_is_the_recurrence(device, precision):
    optimizer = OptimizerSpec(lr=1e-2)
    ema = EmaSpec(decay=DECAY, device=device)
    found, expected = averaged(Strategy(precision=precision, optimizer=optimizer, ema=ema))
    for name, average in found.items():
        torch.testing.assert_close(average.double(), expected[name], **TOLERANCE)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_an_ema_by_a_power_function_is_the_recurrence_of_the_paper(device):
    """The weights before the first step do not count. The paper gives γ with three digits: 5e-4 of the exponent, and
    as much of the distance that the weights moved."""
    strategy = Strategy(precision="fp32", optimizer=OptimizerSpec(lr=1e-2), ema=EmaSpec(power=0.1, device=device))
    found, expected = averaged(strategy)
    for name, average in found.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_each_of_several_emas_is_what_it_would_be_alone(device, precision):
    """To the bit, with fp32 weights, and with weights that are cast to fp32 by chunks."""

    def of(**kind):
        strategy = Strategy(precision=precision, optimizer=OptimizerSpec(lr=1e-2), ema=EmaSpec(**kind, device=device))
        torch.manual_seed(0)  # bf16_sr rounds by it
        engine, family = started(strategy)
        ema = engines.ema_of(engine)
        for step in range(3):
            train_step(engine, family, FlowMatchingSpec(), [one_batch(step)], lr=1e-2, ema=ema)
        return ema

    both, alone = of(widths=(0.05, 0.1)), [of(power=width) for width in (0.05, 0.1)]
    assert len(both.tensors()) == 2 * len(alone[0].tensors())
    for averages, single in zip(both.every, alone, strict=True):
        assert all(map(torch.equal, averages, single.averages))
    assert both.averages is both.every[0]


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2, 0.28])
def test_the_profile_of_a_power_function_is_as_wide_as_it_says(width):
    """For weights that equal the step's number, and its square, the EMA has the profile's moments."""
    engine, _ = started(Strategy(precision="fp32", ema=EmaSpec(power=width)))
    engine.masters = [torch.zeros(2)]
    ema = engines.ema_of(engine)
    steps = 4000
    for step in range(1, steps + 1):
        engine.masters[0].copy_(torch.tensor([step / steps, (step / steps) ** 2]))
        ema.update()
    mean, square = ema.averages[0].double().tolist()
    # Sums over n steps differ from integrals by about 1/n, and fp32 adds 4,000 rounding errors.
    assert (square - mean**2) ** 0.5 == pytest.approx(width, rel=2e-3)


def test_an_ema_is_of_one_kind():
    with pytest.raises(ValueError, match=r"ema\.decay is 0\.99, and ema\.power is 0\.1; leave all but one of them out"):
        EmaSpec(decay=0.99, power=0.1)
    assert EmaSpec.model_validate(EmaSpec(power=0.1).model_dump()).decay is None
    assert EmaSpec.model_validate(EmaSpec().model_dump()).decay == 0.9999
    assert EmaSpec(widths=(0.05, 0.1)).decay is None


def test_an_ema_of_bf16_weights_without_masters_is_fp32():
    """Updates of 1/10 of a bf16 step would be lost in bf16."""
    strategy = Strategy(precision="bf16", ema=EmaSpec(decay=DECAY))
    engine = engines.create(
        strategy,
        models.build(MODEL, device="cpu", dtype=torch.bfloat16, seed=0),
        models.family(MODEL.class_name),
        device=torch.device("cpu"),
    )
    engine.masters = [master.bfloat16() for master in engine.masters]
    ema = engines.ema_of(engine)
    expected = [master.double() for master in engine.masters]
    for step in range(1, 6):
        keep = kept(strategy.ema, step)
        for i, master in enumerate(engine.masters):
            master.add_(2.0**-6)
            expected[i] = keep * expected[i] + (1 - keep) * master.double()
        ema.update()
    for average, wanted in zip(ema.averages, expected, strict=True):
        torch.testing.assert_close(average.double(), wanted, **TOLERANCE)


# Two processes: their sharded EMAs are gathered, and compared with the recurrence on whole weights.
_SHARDED = """
import json, sys
import torch, torch.distributed as dist
from tiny_models import SANA as MODEL
from tiny_models import SHAPE
from whole import full_weights
from bigdit import engines, models
from bigdit.dist import world_from_env
from bigdit.profile.steps import batch
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import EmaSpec, Strategy
from bigdit.train.step import train_step

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
document = json.load(open("ds_configs/zero2_bf16.json"))
document |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
document |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
found = {}
for engine_name, ds_config in (("fsdp2", None), ("deepspeed", document)):
    strategy = Strategy(
        engine=engine_name, world_size=2, ds_config=ds_config, gradient_clipping=None,
        ema=EmaSpec(decay=DECAY, device="cpu"),
    )
    family = models.family(MODEL.class_name)
    model = models.build(MODEL, device="cpu", dtype=torch.bfloat16, seed=0)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    ema = engines.ema_of(engine)
    expected = {name: weight.double() for name, weight in full_weights(engine).items()}
    count = sum(weight.numel() for weight in expected.values())
    for step in range(1, 5):
        train_step(engine, family, FlowMatchingSpec(), [batch(SHAPE, strategy)], lr=1e-2, ema=ema)
        keep = min(DECAY, (1 + step) / (10 + step))
        for name, weight in full_weights(engine).items():
            expected[name] = keep * expected[name] + (1 - keep) * weight.double()
    for name, average in full_weights(engine, ema).items():
        torch.testing.assert_close(average.double(), expected[name], **TOLERANCE)
    found[engine_name] = {"of_all": count, "here": sum(average.numel() for average in ema.averages)}
if world.is_main:
    json.dump(found, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_is_averaged_in_shards_is_the_ema_of_the_whole(tmp_path):
    answer = answer_of_two(f"{DECAY = }\n{TOLERANCE = }\n{_SHARDED}", tmp_path)
    for shares in answer.values():
        assert shares["here"] < 0.6 * shares["of_all"]  # half, and the padding


EMA = ("train.checkpoint_every=2", "train.keep_checkpoints=9")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decay=0.9", "power=0.1"])
def test_a_resumed_run_emas_on(tmp_path, features, kind):
    straight = run_to(4, tmp_path / "straight", features, *EMA, f"strategy.ema.{kind}")
    run_to(2, tmp_path / "resumed", features, *EMA, f"strategy.ema.{kind}")
    resumed = run_to(4, tmp_path / "resumed", features, *EMA, f"strategy.ema.{kind}")
    for folder in ("transformer", "transformer_ema"):
        one, other = exported(straight, folder), exported(resumed, folder)
        assert all(torch.equal(one[name], other[name]) for name in one)
    weights, averages = exported(straight, "transformer"), exported(straight, "transformer_ema")
    assert any(not torch.equal(weights[name], averages[name]) for name in weights)
    # Samples can be drawn from the EMA, so that it is as protected as the rest of the checkpoint.
    sampler = Sampler(straight, torch.device("cpu"), ema=True)
    name = "proj_out.weight"
    assert torch.equal(sampler.model().state_dict()[name], averages[name].bfloat16())
    damaged = next(resumed.engine.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=r"is damaged: its checksum differs from that in state\.json"):
        Sampler(resumed, torch.device("cpu"), ema=True).model()
    # A run that begins or ends its EMA is another run.
    with pytest.raises(UserError, match=r"holds an EMA of the weights, and the run has none \(strategy.ema\)"):
        run_to(6, tmp_path / "straight", features)
    with pytest.raises(
        UserError, match=r"holds an EMA with strategy\.ema\..*, and the run asks for strategy\.ema\.power 0\.2: "
    ):
        run_to(6, tmp_path / "straight", features, "strategy.ema.power=0.2")


@pytest.mark.slow
def test_a_checkpoint_without_an_ema_says_so(trained):
    found, _ = checkpoint.latest(trained)
    with pytest.raises(UserError, match=r"--ema: .* holds no EMA of the weights; train with strategy\.ema"):
        Sampler(found, torch.device("cpu"), ema=True)
