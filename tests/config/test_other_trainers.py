"""Keys, options and values of other trainers are answered by their meaning, before their spelling."""

import re

import pytest
from commands import DIGITS

from bigdit.app import app, run
from bigdit.config.stages import load_run
from bigdit.config.strategy_text import parse_strategy
from bigdit.config.wrong import _NAMES, KEYS, suggested
from bigdit.errors import UserError


def problems(*overrides):
    with pytest.raises(UserError) as caught:
        load_run(DIGITS, overrides)
    return [problem.partition(": ")[2] for problem in caught.value.problems]


def test_each_key_leads_to_one_of_the_run():
    """A key that the run lacks, or has itself, would be answered otherwise."""
    assert len(KEYS) == sum(map(len, _NAMES.values()))  # none stands twice
    assert set(problems(*(f"{name}=1" for name in KEYS))) == {
        f"{name}: unknown key; {suggested(meant)}" for name, meant in KEYS.items()
    }


def options_of(command):
    if hasattr(command, "commands"):
        return set().union(*map(options_of, command.commands.values()))
    return {each for param in command.params for each in param.opts}


def test_each_option_is_one_of_a_command():
    import typer

    known = options_of(typer.main.get_command(app))
    assert not {option for meant in KEYS.values() for option in meant.options} - known


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.batch_size=4", "train.batch_size: unknown key; did you mean strategy.micro_batch_size? (samples"),
        ("train.Learning-Rate=1", "train.Learning-Rate: unknown key; did you mean strategy.optimizer.lr?"),
        ("data.image=x", "data.image: unknown key; did you mean data.images? (a folder"),
        ("data.images=[{path: a, num_repeats: 10}]", "data.images.0.num_repeats: unknown key; did you mean "
         "data.images.repeats? (of each source"),
        ("data.images=[{path: a, image_dir: a}]", "data.images.0.image_dir: unknown key; did you mean path? (a folder"),
        ("train.xformers=true", "train.xformers: unknown key; a run has none: attention is torch's own"),
        ("train.noise_offset=0.1", "train.noise_offset: unknown key; a run has none: noise has no offset"),
        ("train.clip_skip=2", "train.clip_skip: unknown key; a run has none: the layer of a text encoder is that of"),
        ("data.validation_split=0.1", "data.validation_split: unknown key; did you mean validation? ({samples: 256"),
        ("strategy.lora.dim=16", "strategy.lora.dim: unknown key; did you mean strategy.lora.rank?"),
        ("data.images=[{path: a, class_tokens: sks}]", "data.images.0.class_tokens: unknown key; did you mean "
         "data.images.caption? (one"),
        ("strategy.precision=no", "strategy.precision is false, which is unknown; did you mean fp32?"),
        ("data.buckets=512", "data.buckets: it is a list of sizes, such as [[512, 512]]; 512 was found"),
        ("data.buckets=[512x768]", "data.buckets: it is a list of sizes, such as [[512, 768]]"),
        ("data.buckets=[512, 768]", "data.buckets: it is a list of sizes, such as [[512, 768]]"),
        ("network={linear: 16}", "network: unknown key; did you mean strategy.lora? ({rank: 16, alpha: 16})"),
        ("strategy.lora_base=int8", "strategy.lora_base: unknown key; did you mean strategy.lora.base? (bf16, int8, "),
        ("data.conditioning_data=edges", "data.conditioning_data: unknown key; did you mean data.images.reference?"),
        ("strategy.engine=DDP", "strategy.engine is 'DDP', which is unknown; did you mean ddp?"),
        ("train.lr_schedule=cosine_with_restarts", "train.lr_schedule is 'cosine_with_restarts', which is unknown; "
         "did you mean cosine? (without restarts)"),
        ("strategy.optimizer.name=PagedAdamW8bit", "strategy.optimizer.name is 'PagedAdamW8bit', which is unknown; "
                                                   "did you mean paged_adamw_8bit?"),
        ("strategy.precision=bfloat16", "strategy.precision is 'bfloat16', which is unknown; did you mean bf16?"),
    ],
)  # fmt: skip
def test_what_others_call_it_is_answered_by_its_meaning(override, line):
    (found,) = problems(override)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("dataset.toml", "[general]\nresolution = 512\n", [r"the config .* is TOML, as other trainers have it; {}"]),
        ("job.yaml", "job: extension\nconfig: {process: []}\n", [r".*: it has none of model, data, .*, output; {}"]),
        (
            "config.json",
            '{"--learning_rate": 1e-4, "--seed_everything": 1}',
            [r".*: it has none of model, .*; {}", r".*: --learning_rate: .* did you mean strategy\.optimizer\.lr\?"],
        ),
    ],
)
def test_a_whole_config_of_another_trainer_is_named_as_such(tmp_path, name, text, lines):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        load_run(tmp_path / name)
    begin = "`bigdit init` writes a run.yaml for a model, a GPU and a folder of images"
    for problem, line in zip(error.value.problems, lines, strict=True):
        assert re.fullmatch(line.format(begin), problem)


AI_TOOLKIT = """
job: extension
config:
  name: fox
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16, linear_alpha: 16}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - {folder_path: foxes, caption_ext: txt, cache_latents_to_disk: true, resolution: [512, 768]}
      train: {batch_size: 1, steps: 2000, gradient_accumulation_steps: 1, lr: 1e-4, optimizer: adamw8bit}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, quantize: true}
      sample: {sample_every: 250, prompts: [a fox], guidance_scale: 4, sample_steps: 20, walk_seed: true}
"""


def test_a_config_is_answered_at_any_depth(tmp_path):
    (tmp_path / "job.yaml").write_text(AI_TOOLKIT)
    with pytest.raises(UserError) as error:
        load_run(tmp_path / "job.yaml")
    place, lines = f"{tmp_path}/job.yaml: config.process.0.", error.value.problems[1:]
    found = dict(line.removeprefix(place).split(": unknown key; did you mean ") for line in lines)
    assert {key: meant.partition("?")[0] for key, meant in found.items()} == {
        "network.linear": "strategy.lora.rank",
        "network.linear_alpha": "strategy.lora.alpha",
        "save.dtype": "strategy.precision",
        "save.save_every": "train.checkpoint_every",
        "save.max_step_saves_to_keep": "train.keep_checkpoints",
        "datasets": "data",
        "datasets.0.folder_path": "data.images",
        "datasets.0.caption_ext": "data.images.captions",
        "datasets.0.cache_latents_to_disk": "data.features",
        "datasets.0.resolution": "data.buckets",
        "train.batch_size": "strategy.micro_batch_size",
        "train.steps": "train.steps",
        "train.gradient_accumulation_steps": "strategy.grad_accum_steps",
        "train.lr": "strategy.optimizer.lr",
        "train.optimizer": "strategy.optimizer",
        "model.name_or_path": "model.name",
        "model.quantize": "strategy.lora.base",
        "sample.sample_every": "samples.every",
        "sample.prompts": "samples.captions",
        "sample.guidance_scale": "samples.guidance",
        "sample.sample_steps": "samples.steps",
    }


def test_a_strategy_is_answered_by_its_own_keys():
    with pytest.raises(UserError, match=r"^--strategy: batch_size: unknown key; did you mean micro_batch_size\?"):
        parse_strategy(["single,batch_size=4"])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("plan", "--image-size", "512"), "--image-size; did you mean --resolution? (1024, or 480x832"),
        (("plan", "--train_batch_size", "4"), "--train_batch_size; did you mean --micro-batch? "),
        (("train", "--learning-rate", "1e-4"), "--learning-rate; did you mean --set strategy.optimizer.lr=…?"),
        (("export", "--network-dim", "16"), "--network-dim; did you mean strategy.lora.rank in a run's YAML?"),
        (("train", "my/run.yaml"), "missing option '--config'; did you mean --config my/run.yaml? (`bigdit train"),
        (("plan", "--micro-batsh", "4"), "--micro-batsh (Possible options: --micro-batch"),
    ],
)
def test_options_too(arguments, hint):
    with pytest.raises(UserError) as error:
        run(arguments)
    assert hint in str(error.value)
