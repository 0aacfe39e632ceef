"""DeepSpeed's document: what it may contain, what is filled in, and what is refused before anything runs."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from bigdit.config.wrong import wrong
from bigdit.errors import UserError
from bigdit.strategy import Strategy, deepspeed

HOST = {"device": "cpu"}


def _complete(document: dict[str, Any] | None, **strategy: Any) -> tuple[dict[str, Any], list[str]]:
    """DeepSpeed's document for a strategy with this one; and the problems."""
    asked = {"engine": "deepspeed", "ds_config": document, **strategy}
    try:
        return Strategy.model_validate(asked).ds_document, []
    except ValidationError as error:
        return {}, wrong(error, asked, Strategy)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_precision_turns_its_section_on_and_no_other(precision: str) -> None:
    complete, problems = _complete({"bf16": "auto", "fp16": {"initial_scale_power": 12}}, precision=precision)
    assert problems == []
    assert complete["bf16"] == {"enabled": precision == "bf16"}
    assert complete["fp16"] == {"initial_scale_power": 12, "enabled": precision == "fp16"}


def test_a_section_of_another_precision_is_a_contradiction() -> None:
    _, problems = _complete({"fp16": {"enabled": True}}, precision="bf16")
    assert problems == ['ds_config.fp16.enabled is True, and precision makes it False; use "auto"']


def test_the_document_is_of_this_engine_alone() -> None:
    assert _complete(None)[1] == ["engine deepspeed needs ds_config, DeepSpeed's JSON; set it, or use engine fsdp2"]
    _, problems = _complete({}, engine="single")
    assert problems == ["ds_config belongs to the engine deepspeed, and engine is single; set it to null"]


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
    assert complete["zero_force_ds_cpu_optimizer"] is False  # torch's AdamW steps on the CPU
    assert complete["zero_optimization"] == zero


_CPU_ADAM = "needs DeepSpeedCPUAdam, and bigdit steps its own optimizer; remove it"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"zero_optimization": {"stage": 2}, "compile": {"deepcompile": True}},
            "ds_config.compile.deepcompile is set: engines are never compiled by DeepSpeed here; remove it",
        ),
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
            "ds_config.zero_optimization.zero_quantized_weights is True: it runs DeepSpeed's own CUDA kernels, "
            "whose memory an emulated GPU cannot count; remove it",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "ds_config.zero_optimization.zero_hpz_partition_size is 8: it shards within a node, and plans know "
            "processes, not nodes; remove it",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "ds_config.zero_optimization.zenflow is {'topk_ratio': 0.1}: it steps the optimizer outside the training "
            "step; remove it",
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
            "ds_config.amp: strategy.precision of the run sets this; remove it from ds_config",
        ),
    ],
)
def test_what_cannot_be_planned_or_trained_is_refused(document: dict[str, Any], message: str) -> None:
    assert _complete(document)[1] == [message]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"zero_optimization": 2}, "ds_config.zero_optimization is 2, and a mapping was expected"),
        (
            {"zero_optimization": {"offload_param": True}},
            "ds_config.zero_optimization.offload_param is True, and a mapping was expected",
        ),
        ({"grad_clipping": 1}, "ds_config.grad_clipping: unknown key; did you mean gradient_clipping?"),
        ({"stage": 2}, "ds_config.stage: unknown key; did you mean "),
        ({"bf16": True}, "ds_config.bf16 is True, and a mapping was expected"),
    ],
)
def test_keys_that_deepspeed_would_pass_over_are_refused(document: dict[str, Any], message: str) -> None:
    (found,) = _complete(document)[1]
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "overlap_com: unknown key"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "offload_optimizer.devise"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size"),
        ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op"),
    ],
)
def test_what_deepspeed_does_not_take_is_reported_as_it_tells_it(document: dict[str, Any], message: str) -> None:
    from bigdit.engines.deepspeed import check_document

    with pytest.raises(UserError) as caught:
        check_document(Strategy(engine="deepspeed", ds_config=document))
    assert all(line.startswith("strategy.ds_config: DeepSpeed rejects it: ") for line in caught.value.problems)
    assert message in str(caught.value)


def test_sizes_may_be_written_as_powers_and_everything_may_be_auto() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": "auto", "allgather_bucket_size": "auto"}
    assert _complete({"zero_optimization": zero, "steps_per_print": "auto"})[1] == []


class _Asked(dict[str, Any]):
    """A document that records which of its keys were read."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Asked:
        return self


def test_the_known_keys_are_those_of_the_installed_deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config

    config.DeepSpeedConfig(_Asked(train_micro_batch_size_per_gpu=1))
    # amp is gone, and our refusal says what took its place; bfloat16 is the old name of bf16.
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "bfloat16"} - {"amp"}
    assert set(deepspeed._TOP_LEVEL.split()) == _Asked.asked - removed
