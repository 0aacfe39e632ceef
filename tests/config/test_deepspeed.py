"""What DeepSpeed's document may say, what is filled in, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from bigdit.config.deepspeed import complete_ds_config, ds_values
from bigdit.spec import Strategy

HOST = {"device": "cpu"}


def _complete(document: dict[str, Any], **strategy: Any) -> tuple[dict[str, Any], list[str]]:
    return complete_ds_config(document, ds_values(Strategy(**strategy), "train."))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_precision_turns_its_section_on_and_no_other(precision: str) -> None:
    complete, problems = _complete({"bf16": "auto", "fp16": {"initial_scale_power": 12}}, precision=precision)
    assert problems == []
    assert complete["bf16"] == {"enabled": precision == "bf16"}
    assert complete["fp16"] == {"initial_scale_power": 12, "enabled": precision == "fp16"}


def test_a_section_of_another_precision_is_a_contradiction() -> None:
    _, problems = _complete({"fp16": {"enabled": True}}, precision="bf16")
    assert problems == ['ds_config.fp16.enabled is True, and train.precision makes it False; use "auto"']


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "offload_optimizer": HOST},
        {"stage": 2, "offload_optimizer": HOST | {"pin_memory": True}},
        {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
        {"stage": 3, "offload_optimizer": None, "offload_param": {"device": "none"}},
    ],
)
def test_offload_to_the_host_is_accepted(zero: dict[str, Any]) -> None:
    complete, problems = _complete({"zero_optimization": zero})
    assert problems == []
    assert complete["zero_force_ds_cpu_optimizer"] is False  # torch's AdamW steps on the host
    assert complete["zero_optimization"] == zero


_CPU_ADAM = "needs DeepSpeedCPUAdam, and bigdit steps its own optimizer; remove it"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
            "ds_config.zero_optimization.offload_optimizer.device is 'nvme': it needs DeepSpeed's asynchronous I/O, "
            "compiled with libaio, and a disk whose speed no plan knows; use 'cpu'",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": HOST}},
            "ds_config.zero_optimization.offload_param needs zero_optimization.stage 3 or above, and it is 2",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": HOST}},
            "ds_config.zero_optimization.offload_optimizer needs zero_optimization.stage 1 or above, and it is 0",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}},
            "ds_config.zero_optimization.offload_optimizer.device is 'disk'; it is 'cpu' or 'none'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": HOST | {"ratio": 0.5}}},
            "ds_config.zero_optimization.offload_optimizer.ratio is 0.5: a part on each device needs DeepSpeedCPUAdam; "
            "use 1.0",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": HOST | {"super_offload": True}}},
            "ds_config.zero_optimization.offload_optimizer.super_offload needs DeepSpeedCPUAdam in a process of its "
            "own; remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "ds_config.zero_optimization.zero_quantized_weights is True: it runs CUDA kernels of DeepSpeed's own, "
            "whose memory no rehearsal sees; remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "ds_config.zero_optimization.zero_hpz_partition_size is 8: it shards within a node, and a rehearsal knows "
            "processes, not nodes; remove it",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "ds_config.zero_optimization.zenflow is {'topk_ratio': 0.1}: it steps the optimizer beside the training "
            "step, and not within it; remove it",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "ds_config.zero_optimization.compute_grad_norm is False: it hides gradients that are not finite, and fp32 "
            "would train on them; remove it",
        ),
        (
            {"bf16": {"check_grad_overflow": False}},
            "ds_config.bf16.check_grad_overflow is off: gradients that are not finite are stepped; remove it",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            f"ds_config.bf16.bf16_master_weights_and_grads {_CPU_ADAM}",
        ),
        (
            {"zero_force_ds_cpu_optimizer": True},
            'ds_config.zero_force_ds_cpu_optimizer is True, and optimizer makes it False; use "auto"',
        ),
        (
            {"amp": {"enabled": True}},
            "ds_config.amp: bigdit sets this with train.precision in the run's config; remove it from the JSON",
        ),
    ],
)
def test_what_cannot_be_rehearsed_or_trained_is_refused(document: dict[str, Any], message: str) -> None:
    assert _complete(document)[1] == [message]
