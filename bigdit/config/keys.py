"""Keys of a Strategy as a run's YAML has them: what is wrong with how a run is stepped is said by its own keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

IN_RUN = {
    "world_size": "engine.processes",
    "ds_config": "engine.ds_config",
    "dp_replicate": "engine.dp_replicate",
    "reshard_after_forward": "engine.reshard_after_forward",
    "cpu_offload": "engine.cpu_offload",
    "read_ahead_steps": "data.read_ahead_steps",
    **{
        key: f"train.{key}"
        for key in (
            *("micro_batch_size", "grad_accum_steps", "precision", "optimizer_in_backward", "checkpointed_blocks"),
            *("checkpointing", "offload_activations", "compile_blocks", "blocks_to_swap", "gradient_clipping"),
            *("ema", "lora"),
        )
    },
}
"""By the Strategy's own. `optimizer` is the same in both, and `engine` is engine.name, which texts call by the word."""

_KEY = re.compile(rf"(?<![\w.])({'|'.join(IN_RUN)})(?!\w)")
_ENGINE = re.compile(r"(?<![\w.])(?<!the )engine (?=is |single|deepspeed|fsdp2)")


def in_run(problems: Iterable[str], *, launched: bool = False) -> list[str]:
    """The Strategy's `problems` by the keys of a run; `launched`: its processes were started by another launcher, which
    says how many they are."""
    keys = IN_RUN | ({"world_size": "WORLD_SIZE"} if launched else {})
    return [_ENGINE.sub("engine.name ", _KEY.sub(lambda found: keys[found[1]], each)) for each in problems]
