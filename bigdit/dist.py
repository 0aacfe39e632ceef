"""The rank of this process, from the environment variables of launchers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bigdit.errors import UserError

PORT = 29500
"""The port of the first of several machines where a launcher gets none, as in torchrun and accelerate."""

ACCELERATE = {
    "cpu": ("ACCELERATE_USE_CPU", "false"),
    "use_deepspeed": ("ACCELERATE_USE_DEEPSPEED", ""),
    "use_fsdp": ("ACCELERATE_USE_FSDP", ""),
    "use_megatron_lm": ("ACCELERATE_USE_MEGATRON_LM", ""),
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION", "no"),
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "no"),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ""),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", ""),
    "deepspeed_config_file": ("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", ""),
    "offload_optimizer_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", ""),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", ""),
    "fsdp_version": ("FSDP_VERSION", ""),
    "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    "fsdp_activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", "false"),
    "parallelism_config_dp_replicate_size": ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
    "parallelism_config_tp_size": ("PARALLELISM_CONFIG_TP_SIZE", "1"),
    "parallelism_config_cp_size": ("PARALLELISM_CONFIG_CP_SIZE", "1"),
    "parallelism_config_sp_size": ("PARALLELISM_CONFIG_SP_SIZE", "1"),
}
"""Options of `accelerate launch` that change a step: variables (accelerate/utils/launch.py) and defaults."""


@dataclass(frozen=True)
class World:
    """A process: `rank` of `world_size`, and `local_rank` on this machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def of_samples(self, cp: int) -> World:
        """The place of this process's group, where groups of `cp` neighbouring processes share samples."""
        return World(self.rank // cp, self.local_rank, self.world_size // cp)


def world_from_env() -> World:
    """The world of RANK, LOCAL_RANK and WORLD_SIZE, which torchrun, deepspeed and accelerate set; else one process."""
    values = {}
    for key, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(key, default)
        if not text.isdigit():
            raise UserError(f"the environment variable {key} should be a number, and {text!r} was found")
        values[key] = int(text)
    return World(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"])


def processes_here() -> int | None:
    """The number of processes on this machine, from torchrun and accelerate (LOCAL_WORLD_SIZE) or deepspeed
    (LOCAL_SIZE)."""
    found = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ""))
    return int(found) if found.isdigit() and int(found) else None


def launcher_holds_store() -> bool:
    """Whether the store of all processes is not rank 0's: torchrun's, and that of `bigdit train` on one machine."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def asked_of_accelerate() -> dict[str, str]:
    """The options of ACCELERATE that differ from their defaults; empty for other launchers."""
    found = {option: (os.environ.get(variable, ""), default) for option, (variable, default) in ACCELERATE.items()}
    return {option: text for option, (text, default) in found.items() if text.lower() not in ("", "auto", default)}
