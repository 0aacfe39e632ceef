"""Plans of the digits as files, and runs with their strategies."""

import pytest
import yaml
from commands import DIGITS, TINY

from bigdit.config.plan_file import Asked, Expected, PlanFile, write_plan_file
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError, versions
from bigdit.search.of_run import section
from bigdit.strategy import BatchShape, ModelSpec, OptimizerSpec, Strategy

DIGITS_MODEL = yaml.safe_load(DIGITS.read_text())["model"]
TINY_KWARGS = DIGITS_MODEL["kwargs"] | {
    key.removeprefix("model.kwargs."): int(value)
    for key, _, value in (override.partition("=") for override in TINY)
    if key.startswith("model.kwargs.")
}
SINGLE = Strategy(micro_batch_size=8, grad_accum_steps=2, checkpointed_blocks=1, gradient_clipping=1.0)


def plan_of(strategy=SINGLE, *, kwargs=None, **found):
    """A plan of the digits' model. All but its strategy is made up."""
    model = ModelSpec(name="digits", class_name=DIGITS_MODEL["class_name"], kwargs=kwargs or DIGITS_MODEL["kwargs"])
    return made_up(model, BatchShape(latents=(4, 4, 6), text=(32, 64)), strategy, **found)


def made_up(model, batch, strategy, *, gpus_per_node=8, verdict="FITS", expandable_segments=False):
    """A made-up plan for A40s, for images twice as high and wide as their latents."""
    height, width = (2 * side for side in batch.latents[-2:])
    return PlanFile(
        model=model,
        batch=batch,
        request=Asked(
            gpu="a40",
            gpus_per_node=gpus_per_node,
            resolution=(height, width),
            frames=None,
        ),
        strategy=strategy,
        expandable_segments=expandable_segments,
        expected=Expected(
            verdict=verdict,
            usable_bytes=44 << 30,
            peak_allocated_bytes=39 << 30,
            peak_reserved_bytes=40 << 30,
            process_bytes=(40 << 30, 41 << 30),
            samples_per_second_per_gpu=(1e-8, 9.25),
            host_bytes=1 << 30,
        ),
        micro_batch_sizes=(),
        phases={"step": 9},
        encoder_bytes=0,
        versions=versions(),
        catalogue="0123456789abcdef",
    )


def zero2(**changes):
    return parse_strategy(["zero2,world_size=2,micro_batch_size=8"]).model_copy(update=changes)


def write(plan, folder):
    """Write a plan's folder, with what training reads of it."""
    folder.mkdir(exist_ok=True)
    write_plan_file(folder / "plan.yaml", plan)
    return folder


def run_yaml(folder, planned=None, **sections):
    """The digits' run with the strategy of the plan in `folder`/plan, and `sections` changed."""
    document, planned = yaml.safe_load(DIGITS.read_text()), planned or plan_of()
    optimizer = planned.strategy.optimizer.model_copy(update={"lr": 2e-3, "betas": (0.9, 0.99)})
    document |= {
        "model": {"class_name": planned.model.class_name, "kwargs": planned.model.kwargs},
        "strategy": section(planned.strategy.model_copy(update={"optimizer": optimizer})),
        "train": {"steps": 8, "warmup_steps": 2, "lr_schedule": "cosine"},
        "plan": "plan",
    }
    for name, changed in sections.items():
        document[name] = document.get(name, {}) | changed if isinstance(changed, dict) else changed
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def problems(run, *arguments):
    with pytest.raises(UserError) as caught:
        run(*arguments)
    return list(caught.value.problems)


SWAPPED = Strategy(
    precision="bf16_sr",
    optimizer=OptimizerSpec(name="adafactor"),
    optimizer_in_backward=True,
    gradient_clipping=None,
    checkpointed_blocks="all",
    blocks_to_swap=3,
)
STRATEGIES = [SINGLE, SWAPPED, zero2(), parse_strategy(["fsdp2,world_size=4,dp_replicate=2,ema.device=cpu"])]
