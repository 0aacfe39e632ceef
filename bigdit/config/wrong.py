"""Messages for invalid values in a document: one line for each key, without pydantic's terms.

The names of keys, options and values in other trainers are from the documentation of diffusers' scripts, kohya's
sd-scripts, SimpleTuner, ai-toolkit, OneTrainer, accelerate and transformers' Trainer.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigdit.errors import nearest
from bigdit.objective_spec import NUMBER
from bigdit.strategy import Contradictory


class Meant(NamedTuple):
    """The `key` of a run, a note on its value, and the `options` of commands for it."""

    key: str
    note: str = ""
    options: tuple[str, ...] = ()


_NAMES: dict[Meant, str] = {
    Meant("model.name", "of `bigdit models`; model.init_from is the folder of its weights", ("--model",)): (
        "pretrained_model_name_or_path model_name_or_path name_or_path base_model_name base_model model_name model_id "
        "pretrained_model model_path checkpoint_path model_family model_flavour arch"
    ),
    Meant("model.init_from", "the folder of a model's weights, or one file"): "dit dit_path transformer_path",
    Meant("model.lora_from", "LoRA weights to start from"): (
        "network_weights init_lora lora_weight lora_model_name pretrained_lora_path"
    ),
    Meant("data.images", "a folder, a file or a list of them"): (
        "data.image instance_data_dir instance_data_root train_data_dir data_dir data_root data_path dataset_path "
        "dataset_name dataset_dir folder_path image_dir image_folder image_path image_file concepts "
        "concept_file_name image_directory video_directory image_jsonl_file video_jsonl_file"
    ),
    Meant("data.images.repeats", "of each source: data.images is a list of {path, repeats}"): (
        "repeats num_repeats n_repeats dataset_repeats repeat"
    ),
    Meant("data.images.image", "the column of images"): "image_column video_column",
    Meant("data.images.captions", "columns of a table; .txt and .json files next to images are found without it"): (
        "caption_column text_column caption_ext caption_extension caption_strategy"
    ),
    Meant("data.images.reference", "a column; in a folder, x.reference.png beside x.png; with data.references"): (
        "control_path control_path_1 control_directory conditioning_data_dir cond_image_column "
        "conditioning_image_column"
    ),
    Meant("data.images.flip", "true, of each source; mirrored images are encoded too"): (
        "random_flip flip_aug flip hflip horizontal_flip flip_prob flip_augmentation"
    ),
    Meant(
        "data.images.crops", "a number, of each source; 1 is centred"
    ): "random_crop center_crop crop_aspect crop crop_style",
    Meant("data.images.mask", "file or alpha, of each source"): (
        "masked_loss alpha_mask masked_training use_masks mask_path"
    ),
    Meant("data.images.loss_weight", "of a regularisation set, a source of its own", ("--with-captions",)): (
        "prior_loss_weight with_prior_preservation class_data_dir reg_data_dir is_reg num_class_images"
    ),
    Meant("data.min_side", "pixels"): "minimum_image_size min_image_size min_size",
    Meant("data.max_upscale", "1 enlarges no image"): "bucket_no_upscale no_upscale",
    Meant("data.images.caption", "one caption for all images of a source"): (
        "instance_prompt class_prompt default_caption"
    ),
    Meant("data.images.caption_prefix", "text before each caption of a source"): "trigger_word trigger prompt_prefix",
    Meant("data.images.tags", "{variants: 4, keep: 1, dropout: 0.1}, of each source"): (
        "shuffle_caption shuffle_tokens shuffle_tags keep_tokens keep_tags_count caption_tag_dropout_rate tag_dropout "
        "caption_separator"
    ),
    Meant("data", "its images, features and buckets"): "datasets dataset dataset_config data_backend_config",
    Meant("data.features", "the folder of latents and embeddings; `bigdit extract` fills it", ("--features",)): (
        "cache_dir cache_latents cache_latents_to_disk latent_cache latent_caching latents_dir cache_text_embeddings "
        "cache_text_encoder_outputs vae_cache text_embed_cache cache_text_encoder_outputs_to_disk cache_directory "
        "cache_dir_vae cache_dir_text precompute_conditions"
    ),
    Meant("data.buckets", "[[height, width]] in pixels", ("--resolution", "--size")): (
        "resolution resolutions image_size img_size base_resolution target_size width height enable_bucket "
        "min_bucket_reso max_bucket_reso bucket_reso_steps aspect_ratio_bucketing aspect_bucketing resize_to "
        "height_buckets width_buckets aspect_bucket_alignment"
    ),
    Meant("data.buckets", "[[frames, height, width]]", ("--frames",)): (
        "num_frames n_frames video_length max_num_frames frame_buckets target_frames"
    ),
    Meant("data.fps", "frames a second"): "video_fps target_fps sample_fps",
    Meant("data.first_frame_dropout", "a share, such as 0.05"): "noised_image_dropout",
    Meant("data.caption_dropout", "a share, such as 0.1"): (
        "caption_dropout_rate caption_dropout_probability caption_drop_rate proportion_empty_prompts class_dropout_prob"
    ),
    Meant("data.read_threads", "data.workers are those of `bigdit extract`", ("--workers",)): (
        "num_workers dataloader_num_workers max_data_loader_n_workers dataloader_threads"
    ),
    Meant("strategy.read_ahead_steps", "steps"): "prefetch_factor dataloader_prefetch_factor",
    Meant("encoders.image.path", "the VAE's folder"): "pretrained_vae_model_name_or_path vae_path vae vae_model ae",
    Meant(
        "encoders.text", "pipeline: the folder of a pipeline with its text encoders"
    ): "text_encoder text_encoder_path",
    Meant("encoders.text.max_tokens", "tokens"): (
        "max_sequence_length tokenizer_max_length max_token_length t5xxl_max_token_length"
    ),
    Meant("objective.name", "flow_matching or ddpm"): "noise_scheduler",
    Meant("objective.prediction", "epsilon, v or x0"): "prediction_type parameterization",
    Meant("objective.t_distribution", "logit_normal, uniform or mode"): (
        "weighting_scheme timestep_sampling timestep_type timestep_distribution "
        "flow_weighting_scheme flow_use_uniform_schedule"
    ),
    Meant("objective.shift", "a number"): (
        "discrete_flow_shift flow_shift timestep_shift flow_schedule_shift flux_schedule_shift"
    ),
    Meant("objective.t_range", "[LOW, HIGH], t from 0 to 1"): (
        "min_timestep max_timestep min_timestep_boundary max_timestep_boundary timestep_boundary boundary_ratio"
    ),
    Meant("objective.min_snr_gamma", "of ddpm"): "snr_gamma",
    Meant("strategy.optimizer", "{name: adamw, lr: 1e-4, betas: [0.9, 0.999], weight_decay: 0.01}"): (
        "optimizer optimizer_args optimizer_params optimizer_config"
    ),
    Meant("strategy.optimizer.lr"): "learning_rate lr base_lr init_lr unet_lr transformer_lr",
    Meant(
        "strategy.optimizer.name", "adamw_8bit, adafactor, came, …", ("--optimizer",)
    ): "optimizer_type optimizer_name optim",
    Meant(
        "strategy.optimizer.name", "adamw_8bit in the place of true", ("--optimizer",)
    ): "use_8bit_adam use_8bit_optimizer",
    Meant("strategy.optimizer.betas", "[0.9, 0.999]"): (
        "adam_beta1 adam_beta2 beta1 beta2 optimizer_beta1 optimizer_beta2"
    ),
    Meant("strategy.optimizer.weight_decay"): "adam_weight_decay wd weight_decay optimizer_weight_decay",
    Meant("strategy.optimizer.eps"): "adam_epsilon epsilon",
    Meant("strategy.optimizer.d_coef"): "d_coef",
    Meant("strategy.optimizer.safeguard_warmup", "true or false"): "prodigy_safeguard_warmup safeguard_warmup",
    Meant("strategy.optimizer.use_bias_correction", "true or false"): "prodigy_use_bias_correction use_bias_correction",
    Meant("strategy.micro_batch_size", "samples that a GPU takes at once", ("--micro-batch",)): (
        "batch_size train_batch_size per_device_train_batch_size micro_batch local_batch_size batch_size_per_gpu "
        "train_micro_batch_size_per_gpu"
    ),
    Meant("strategy.global_batch_size", "samples of a step over all GPUs", ("--global-batch",)): (
        "effective_batch_size total_batch_size global_batch"
    ),
    Meant("strategy.grad_accum_steps", "micro-batches of a step"): (
        "gradient_accumulation_steps gradient_accumulation grad_accumulation accumulation_steps grad_accum "
        "accumulate_grad_batches"
    ),
    Meant("train.steps", "of the optimizer"): (
        "steps max_train_steps max_steps num_steps total_steps train_steps num_train_steps iterations max_iterations"
    ),
    Meant("train.epochs", options=("--epochs",)): "num_train_epochs max_train_epochs num_epochs max_epochs epoch",
    Meant("strategy.precision", "bf16, bf16_sr, fp16, tf32 or fp32", ("--precision",)): (
        "mixed_precision dtype train_dtype weight_dtype full_bf16 full_fp16 bf16 fp16 allow_tf32"
    ),
    Meant("strategy.gradient_clipping", "the most that the norm may be"): (
        "max_grad_norm clip_grad_norm grad_clip gradient_clip_val max_norm grad_clip_norm"
    ),
    Meant("strategy.checkpointed_blocks", "all in the place of true, or how many blocks", ("--checkpointed-blocks",)): (
        "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing use_gradient_checkpointing "
        "grad_checkpoint"
    ),
    Meant("strategy.checkpointed_segments.blocks", "blocks that are recomputed at once"): (
        "gradient_checkpointing_interval"
    ),
    Meant("strategy.checkpointed_segments.every", "from one segment to the next"): (
        "gradient_checkpointing_segment_stride"
    ),
    Meant("strategy.offload_activations", "true"): (
        "activation_offloading enable_activation_offload cpu_offload_checkpointing gradient_checkpointing_offload"
    ),
    Meant("strategy.blocks_to_swap", "how many blocks"): (
        "block_swap num_blocks_to_swap layer_offload_fraction layer_offloading_transformer_percent block_offload "
        "layer_offloading"
    ),
    Meant("strategy.optimizer_in_backward", "true"): "fused_backward_pass fused_back_pass",
    Meant("strategy.compile_blocks", "true"): "torch_compile compile use_compile dynamo_backend",
    Meant("strategy.float8", "tensorwise or rowwise", ("--fp8",)): "float8 fp8 use_fp8 fp8_training enable_fp8",
    Meant("strategy.ema", "{decay: 0.9999}; --ema takes auto, gpu or cpu", ("--ema",)): "use_ema enable_ema ema_config",
    Meant("strategy.ema.device"): "ema_device ema_cpu_only",
    Meant("strategy.ema.decay"): "ema_decay ema_rate",
    Meant("strategy.lora", "{rank: 16, alpha: 16}", ("--lora",)): (
        "network network_module adapter lora_config peft_config training_method network_kwargs "
        "network_args lycoris_config"
    ),
    Meant("strategy.lora.rank", options=("--lora",)): "network_dim lora_rank rank network_rank lora_r r linear",
    Meant("strategy.lora.alpha"): "network_alpha lora_alpha linear_alpha alpha",
    Meant("strategy.lora.targets", "names of linear layers"): (
        "lora_target_modules target_modules lora_layers layer_filter layer_filter_preset flux_lora_target"
    ),
    Meant("strategy.lora.dora", "true"): "use_dora lora_decompose",
    Meant("encoders.text.files", "{text_encoder: FILE} beside encoders.text.pipeline"): "clip_l clip_g t5xxl",
    Meant("strategy.lora.text_encoders", "true"): "train_text_encoder train_te",
    Meant("strategy.lora.text_encoder_lr"): "text_encoder_lr te_lr te_learning_rate",
    Meant("strategy.lora.kind", "lora, lokr or loha"): "lora_type lycoris_algo algo adapter_type peft_type",
    Meant("strategy.lora.rslora", "true"): "use_rslora rank_stabilized rank_stabilised use_rank_stabilized_lora",
    Meant("strategy.lora.ranks", "{PATTERN: rank}"): "rank_pattern block_dims network_reg_dims",
    Meant("strategy.lora.base", "bf16, int8, fp8 or nf4", ("--lora-base",)): (
        "quantize quantization base_model_precision load_in_4bit load_in_8bit fp8_base fp8_base_unet qtype"
    ),
    Meant("train.warmup_steps"): "lr_warmup_steps num_warmup_steps learning_rate_warmup_steps lr_warmup warmup",
    Meant("train.seed"): "seed training_seed",
    Meant("train.min_lr", "a learning rate"): "lr_end lr_scheduler_min_lr_ratio min_learning_rate",
    Meant("train.decay_steps", "steps, of wsd"): "lr_decay_steps num_decay_steps",
    Meant("train.lr_schedule", "constant, cosine or wsd"): ("lr_scheduler lr_scheduler_type learning_rate_scheduler"),
    Meant("train.checkpoint_every", "steps"): (
        "checkpointing_steps checkpoint_interval checkpoint_step_interval save_every save_every_n_steps save_steps "
        "save_interval save_every_n_epochs save_after backup_after"
    ),
    Meant("train.keep_checkpoints", "how many"): (
        "checkpoints_total_limit save_total_limit max_step_saves_to_keep save_last_n_steps"
    ),
    Meant("strategy.world_size", "one a GPU", ("--gpus",)): (
        "num_processes nproc_per_node num_gpus n_gpus gpus world_size num_devices"
    ),
    Meant("strategy.cp", "1, 2, 4 or 8", ("--cp",)): (
        "context_parallel context_parallel_size cp_size sp_size sequence_parallel_size ulysses_degree ulysses_size"
    ),
    Meant("strategy.cp_ring", "1, 2, 4 or 8"): "ring_attention_size ring_degree ring_size",
    Meant("strategy.engine", "single, ddp, deepspeed or fsdp2", ("--engine",)): (
        "distributed_type distributed_backend"
    ),
    Meant("strategy.engine", "fsdp2", ("--engine",)): "use_fsdp fsdp",
    Meant("strategy.engine", "ddp", ("--engine",)): "ddp use_ddp",
    Meant("strategy.ds_config", "DeepSpeed's JSON, with zero_optimization.stage", ("--ds-config", "--engine")): (
        "deepspeed_config deepspeed_config_file deepspeed zero_stage"
    ),
    Meant("samples", "{captions: [a fox], every: 250, steps: 30}"): "sample",
    Meant("samples.captions", options=("--caption",)): (
        "validation_prompt validation_prompts sample_prompts prompts prompt"
    ),
    Meant("samples.every", "steps"): (
        "validation_steps validation_epochs sample_every sample_every_n_steps sample_every_n_epochs sample_after"
    ),
    Meant("samples.steps", options=("--steps",)): (
        "num_inference_steps sample_steps validation_num_inference_steps num_sampling_steps"
    ),
    Meant("samples.guidance", options=("--guidance",)): "guidance_scale cfg_scale cfg validation_guidance",
    Meant("trackers", "a list, such as [wandb]"): "report_to log_with logger use_wandb tensorboard",
    Meant("output", "the folder of a run", ("--out",)): (
        "output_dir out_dir output_path save_dir save_root training_folder workspace_dir results_dir "
        "output_model_destination"
    ),
    Meant("output", "the same command resumes from what lies in it"): "resume_from_checkpoint resume",
}

_VALUES: dict[Meant, str] = {
    Meant("ddp"): "multi_gpu data_parallel distributed_data_parallel",
    Meant("fsdp2"): "fsdp",
    Meant("cosine", "to train.min_lr"): "linear polynomial cosine_with_min_lr cosine_annealing",
    Meant("cosine", "without restarts"): "cosine_with_restarts cosine_with_hard_restarts",
    Meant("constant", "with train.warmup_steps"): "constant_with_warmup",
    Meant("wsd"): "warmup_stable_decay",
    Meant("adamw"): "adam adamw_fused adamw_torch adamw_torch_fused",
    Meant("adamw", "with precision bf16_sr"): "adamw_bf16",
    Meant("adamw_8bit"): "adam_8bit bnb_adamw_8bit adamw_bnb_8bit",
    Meant("paged_adamw_8bit"): "paged_adamw paged_adam_8bit",
    Meant("adamw_8bit_ao"): "ao_adamw_8bit torchao_adamw_8bit",
    Meant("adamw_4bit_ao"): "ao_adamw_4bit torchao_adamw_4bit adamw_4bit",
    Meant("lion_8bit"): "lion paged_lion_8bit bnb_lion_8bit",
    Meant("bf16"): "bfloat16",
    Meant("fp16"): "float16 half",
    Meant("fp32"): "no false float32 float",  # YAML reads no as false
    Meant("squaredcos_cap_v2"): "cosine",
    Meant("v"): "v_prediction velocity",
    Meant("x0"): "sample",
    Meant("epsilon"): "noise eps",
    Meant("logit_normal"): "sigmoid",
    Meant("flow_matching"): "flowmatch flow rectified_flow",
}

_NONE = {
    "attention is torch's own": (
        "xformers sdpa mem_eff_attn use_flash_attn flash_attn sage_attn attn_mode split_attn attention_backend "
        "attention_mechanism enable_xformers_memory_efficient_attention"
    ),
    "metrics and logs lie in the folder output": "logging_dir log_dir logging_steps log_every",
    "nothing is uploaded": "push_to_hub hub_model_id hub_token hub_private_repo",
}
"""Keys of other trainers for which a run has none, by what it does."""

NONE = {name: what for what, names in _NONE.items() for name in names.split()}

KEYS = {name: meant for meant, names in _NAMES.items() for name in names.split()}
"""Keys by their names in other trainers; with the section where the name alone is ambiguous."""


def key_meant(*names: str) -> Meant | None:
    """The meaning of the first of these names that is known from other trainers, in any spelling."""
    return next((KEYS[name] for name in map(_plain, names) if name in KEYS), None)


def meant_within(document: Any, key: str = "") -> Iterator[str]:
    """A line for each key of another trainer's document, at any depth, whose meaning is known."""
    if isinstance(document, list):
        document = dict(enumerate(document))
    for name, value in document.items() if isinstance(document, dict) else ():
        path = f"{key}.{name}".removeprefix(".")
        meant = key_meant(str(name))
        if (what := NONE.get(_plain(str(name)))) is not None:
            yield f"{path}: unknown key; a run has none: {what}"
        elif meant is not None and not isinstance(value, dict):
            yield f"{path}: unknown key; {suggested(meant)}"
        yield from meant_within(value, path)


def _plain(name: str) -> str:
    return name.lstrip("-").casefold().replace("-", "_")


def value_meant(value: str, known: Collection[str]) -> Meant | None:
    """Which of the `known` values is meant: the same in another spelling, or by its name in other trainers."""
    found = [Meant(each) for each in known if _letters(each) == _letters(value)]
    found += [
        meant
        for meant, names in _VALUES.items()
        if meant.key in known and _letters(value) in map(_letters, names.split())
    ]
    return found[0] if found else None


def suggested(meant: Meant, key: str | None = None) -> str:
    """`did you mean train.lr_schedule? (constant, cosine or wsd)`; `key` replaces the key."""
    return f"did you mean {key or meant.key}?" + (f" ({meant.note})" if meant.note else "")


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


Key = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
}
_BOUNDS = {
    "greater_than": ("a number above {:g}", "gt"),
    "greater_than_equal": ("{} or more", "ge"),
    "less_than": ("a number below {:g}", "lt"),
    "less_than_equal": ("{} or less", "le"),
    "too_short": ("a list of at least {}", "min_length"),
    "too_long": ("a list of {}", "max_length"),
    "string_too_short": ("a text of {} or more characters", "min_length"),
}
_MOST_SHOWN = 60


def wrong(error: ValidationError, document: Any, kind: type[BaseModel]) -> list[str]:
    """A line for each key of `document` that is wrong or unknown in a `kind`, then for each that is missing."""
    found: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key(detail, document), []).append(detail)
    inmost = [key for key in found if not any(other[: len(key)] == key and other != key for other in found)]
    inmost.sort(key=lambda key: found[key][0]["type"] == "missing")
    return [line for key in inmost for line in _lines(".".join(map(str, key)), found[key], kind)]


def expected(details: Sequence[ErrorDetails]) -> str:
    """`is 'x', and a whole number or all was expected`: what was found, and what is possible."""
    names = [name for detail in details for name in _names(detail)]
    value = details[0]["input"]
    if details[0]["type"] == "union_tag_invalid":
        value = value["name"]
    if len(names) > 1:
        meant = value_meant(str(value), names)
        near = nearest(str(value), names) if meant is None else suggested(meant)
        return f"is {shown(value)}, which is unknown; {near}"
    kinds = [_expected(detail) for detail in details if not _names(detail)]
    return f"is {shown(value)}, and {' or '.join(dict.fromkeys([*kinds, *names]))} was expected"


def shown(value: Any) -> str:
    """A value in YAML, shortened where it is long."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = repr(value)
    return words.get(text, text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


def _key(detail: ErrorDetails, document: Any) -> Key:
    """The key in the document: pydantic's path without the names of a union's types."""
    key: list[str | int] = []
    for part in detail["loc"]:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            continue
        key.append(part)
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        key.append(detail["loc"][-1])
    if detail["type"] == "union_tag_invalid":
        key.append("name")
    return tuple(key)


def _lines(key: str, details: Sequence[ErrorDetails], kind: type[BaseModel]) -> list[str]:
    cause = details[0].get("ctx", {}).get("error")
    if isinstance(cause, Contradictory):
        return [f"{key}: {problem}" if key else problem for problem in cause.problems]
    return [_line(key, details, kind)]


def _line(key: str, details: Sequence[ErrorDetails], kind: type[BaseModel]) -> str:
    first = details[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_hint(path, kind)}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"{key}: missing" + (f" ({meaning})" if (meaning := _meaning(path, kind)) else "; it has no default")
    if path[-1:] == ["[key]"]:
        return f"{key}: a key must be text; put quotes around it"
    if first["type"] == "value_error":
        message, found = first["msg"].removeprefix("Value error, "), first["input"]
        full = message if isinstance(found, dict | list) else f"{message}; {shown(found)} was found"
        return f"{key}: {full}" if key else message
    if first["type"] in ("model_type", "model_attributes_type"):
        known = _fields_at(path, kind)
        return f"{key} is {shown(first['input'])}, and keys such as {', '.join(known[:6])} were expected"
    return f"{key} {expected(details)}".lstrip()


def _names(detail: ErrorDetails) -> list[str]:
    """The possible names, for a value that is one of several."""
    _, among, names = detail["msg"].partition(" is not one of ")
    if among and detail["type"] == "value_error":  # typer's message
        return re.findall(r"'([^']+)'", names)
    if detail["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    context = detail.get("ctx", {})
    found = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags")))
    return [name for name in found if name != NUMBER]  # stands for a value without a name


def _expected(detail: ErrorDetails) -> str:
    """The expected value, for one of the possible types."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":  # the end of a list
        return f"a list of {int(detail['loc'][-1]) + 1}"
    if kind == "union_tag_not_found":
        return "a mapping with a name"
    if kind == "literal_error":  # of numbers
        return str(context["expected"])
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return words.format(context[bound])
    return _EXPECTED.get(kind, detail["msg"])


def _hint(path: Sequence[str], kind: type[BaseModel]) -> str:
    """Where a misplaced key belongs, its meaning in other trainers, or the nearest key to a misspelt one."""
    here = _fields_at(path[:-1], kind)
    section, key = path[:-1], path[-1]
    if section and (
        others := [name for name in _others(section, kind) if key in _fields_at([*section[:-1], name], kind)]
    ):
        return f"{section[-1]} has no such key; {' and '.join(others)} has it"
    if (what := NONE.get(_plain(key))) is not None:
        return f"a run has none: {what}"
    meant = key_meant(".".join(path), key)
    if meant is not None:
        parts = meant.key.split(".")
        if [part for part in section if not part.isdecimal()][: len(parts)] == parts and "path" in here:
            return suggested(meant, "path")
        if all(part in _fields_at(parts[:at], kind) for at, part in enumerate(parts)):
            return suggested(meant)
        if parts[-1] in here:
            return suggested(meant, parts[-1])
    elsewhere = [f"{section}.{path[-1]}" for section in kind.model_fields if path[-1] in _fields_at([section], kind)]
    return _with_meaning(
        f"did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else nearest(path[-1], here), section, kind
    )


def _with_meaning(hint: str, section: Sequence[str], kind: type[BaseModel]) -> str:
    """The hint, with the meaning of the key if it names only one."""
    name = re.fullmatch(r"did you mean ([\w.]+)\?", hint)
    path = [] if name is None else name[1].split(".") if "." in name[1] else [*section, name[1]]
    meaning = _meaning(path, kind) if path else ""
    return f"{hint} ({meaning})" if meaning else hint


def _others(section: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """The other types of the section at this path, if it is one of a union."""
    names = [_name_of(model) for model in _models_at(section[:-1], kind)]
    return [name for name in names if name is not None and name != section[-1]] if section[-1] in names else []


def _fields_at(path: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """The keys of the section at `path`."""
    models = _models_at(path, kind)
    return list(dict.fromkeys(name for model in models for name in (*model.model_fields, *getattr(model, "also", ()))))


def _meaning(path: Sequence[str], kind: type[BaseModel]) -> str:
    """The first clause of the meaning of the key at `path`; empty without one."""
    found = [meanings(model).get(path[-1]) for model in _models_at(path[:-1], kind)]
    text = next(filter(None, found), "")
    first = re.split(r"[.;] ", " ".join(text.split()))[0].rstrip(".")
    return first[:1].lower() + first[1:]


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field of a model, by key."""
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(parsed, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(under.value.value)
        for field, under in itertools.pairwise(parsed.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) and isinstance(under.value.value, str)
    }


def _models_at(path: Sequence[str], kind: type[BaseModel]) -> list[type[BaseModel]]:
    models = [kind]
    for part in path:
        inner = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if inner:
            models = [m for annotation in inner for m in _models_in(annotation)]
        else:  # the path also has the tag of a discriminated union: `image` → `identity`
            models = [m for m in models if _name_of(m) == part] or models
    return models


def _name_of(model: type[BaseModel]) -> str | None:
    """The tag of a model in a union."""
    found: str | None = getattr(model.model_fields.get("name"), "default", None)
    return found if isinstance(found, str) else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
