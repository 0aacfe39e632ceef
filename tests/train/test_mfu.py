"""MFU: the model's FLOPs beside those that its step takes, and the peak of the GPU that the driver names."""

from contextlib import contextmanager

import pytest
import torch
from tiny_models import SANA, SHAPE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bigdit import models
from bigdit.catalog.gpus import gpu
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest
from bigdit.profile.steps import Witness, batch, build, prepare, training
from bigdit.record.costs import Counting
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.monitor.metrics import Mfu, mfu_of, peak_flops
from bigdit.units import GIB, MIB

CPU = torch.device("cpu")
LUMINA = {"hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1}
LUMINA |= {"multiple_of": 8, "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 32, 32), "cap_feat_dim": 12}


def counted(*, frozen=False, micro_batch_size=2, grad_accum_steps=1, **printed):
    strategy = Strategy(precision="fp32", micro_batch_size=micro_batch_size, **printed)
    mfu = Mfu(SANA, models.family(SANA.class_name), 1e12, frozen=frozen)
    return mfu.flops([batch(SHAPE, strategy)] * grad_accum_steps)


def test_the_flops_are_those_of_a_forward_pass_three_times():
    """Operators are counted as they run. The loss has no matrix product of its own. torch counts no FLOPs of the
    CPU's fused attention, but those of the products that it stands for."""
    counting = Counting()

    class Phases(Witness):
        @contextmanager
        def phase(self, name):
            counting.phases.append(name)
            yield

    strategy = Strategy(precision="fp32", micro_batch_size=2)
    request = StepRequest(model=SANA, batch=SHAPE, strategy=strategy, objective=FlowMatchingSpec())
    workload = prepare(request, build(request))
    with sdpa_kernel(SDPBackend.MATH), counting:
        next(training(workload, CPU, Phases()))
    span = counting.phases.index("forward")
    forward = sum(cost.flops for cost in counting.costs.operators() if cost.span == span)
    assert forward > 0
    assert counted() == 3 * forward


def test_flops_are_of_all_samples_and_of_nothing_that_is_recomputed():
    one = counted(micro_batch_size=1)
    assert counted(micro_batch_size=4) == 4 * one
    assert counted(micro_batch_size=1, grad_accum_steps=3) == 3 * one
    assert counted(micro_batch_size=1, checkpointed_blocks="all") == one


def test_a_frozen_model_has_no_gradients_of_weights():
    assert counted(frozen=True) * 3 == counted() * 2


def test_each_shape_is_counted_once(monkeypatch):
    mfu = Mfu(SANA, models.family(SANA.class_name), 1e12, frozen=False)
    small = batch(SHAPE, Strategy(micro_batch_size=1))
    wide = batch(SHAPE.model_copy(update={"latents": (4, 8, 16)}), Strategy(micro_batch_size=1))
    known = mfu.flops([small, wide])
    monkeypatch.setattr(FlopCounterMode, "get_total_flops", lambda counter: 0)
    assert mfu.flops([wide, small]) == known
    assert mfu.flops([small]) < mfu.flops([wide])


def test_a_model_that_reads_its_masks_has_none():
    spec = ModelSpec(name="lumina", class_name="Lumina2Transformer2DModel", kwargs=LUMINA)
    mfu = Mfu(spec, models.family(spec.class_name), 1e12, frozen=False)
    shape = SHAPE.model_copy(update={"latents": (16, 8, 8)})
    assert mfu.flops([batch(shape, Strategy(micro_batch_size=1))]) is None


@pytest.mark.parametrize(
    ("device", "gib", "precision", "name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "bf16", "h100-sxm", "bf16"),
        ("NVIDIA GeForce RTX 4090", 23.5, "fp16", "rtx-4090", "fp16"),
        ("NVIDIA A40", 44.4, "tf32", "a40", "tf32"),
        ("NVIDIA A40", 44.4, "bf16_sr", "a40", "bf16"),
        ("NVIDIA A40", 44.4, "fp32", "a40", "fp32"),
    ],
)
def test_the_peak_is_the_catalogues_for_the_precision(device, gib, precision, name, rate):
    assert peak_flops(device, int(gib * GIB), precision) == getattr(gpu(name).tflops, rate) * 1e12


def test_a_gpu_that_is_not_known_has_no_peak():
    assert peak_flops("Riva TNT2", 32 * MIB, "fp32") is None


def test_a_cpu_and_an_emulated_gpu_have_none():
    family = models.family(SANA.class_name)
    assert mfu_of(SANA, family, Strategy(), CPU, emulated=False) is None
    assert mfu_of(SANA, family, Strategy(), torch.device("cuda"), emulated=True) is None
