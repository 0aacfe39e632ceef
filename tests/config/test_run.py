"""Configs are strict and can be overridden. All problems are told at once, with the key to change."""

import json

import pytest
from commands import DIGITS, ROOT

from bigdit.catalog.resolve import model_spec
from bigdit.config.check import check
from bigdit.config.stages import load_run, load_stages
from bigdit.errors import UserError


def load_and_check(overrides, config=DIGITS):
    run = load_run(config, [f"strategy.ds_config={ROOT}/ds_configs/zero2_bf16.json", *overrides])
    check(run, model_spec(run.model))


def problems(overrides, config=DIGITS):
    with pytest.raises(UserError) as caught:
        load_and_check(overrides, config)
    return [
        problem.removeprefix(f"{config}: ").removeprefix(f"{config} with --set: ") for problem in caught.value.problems
    ]


def test_the_recipe_is_a_strategy_on_two_processes(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = load_run(DIGITS)
    check(run, model_spec(run.model))
    strategy = run.strategy
    assert (strategy.zero_stage, strategy.global_batch_size, strategy.grad_accum_steps) == (2, 32, 1)
    assert strategy.ds_document["train_micro_batch_size_per_gpu"] == 16
    assert strategy.ds_document["bf16"] == {"enabled": False}
    half = load_run(DIGITS, ["strategy.precision=bf16"])
    assert half.strategy.ds_document["bf16"] == {"enabled": True}
    assert load_run(DIGITS, ["strategy.world_size=1"]).strategy.grad_accum_steps == 2


def test_overrides_reach_nested_keys():
    run = load_run(DIGITS, ["train.steps=7", "data.buckets=[[16, 16]]", "model.kwargs.num_layers=2"])
    assert (run.train.steps, run.data.buckets, run.model.kwargs["num_layers"]) == (7, ((16, 16),), 2)


def test_an_unknown_key_names_the_nearest():
    assert problems(["train.stepz=3"]) == ["train.stepz: unknown key; did you mean steps, decay_steps?"]
    assert problems(["encoders.image.facto=2"]) == [
        "encoders.image.facto: unknown key; did you mean factor? (pixels per side of a latent)"
    ]
    assert problems(["encoders.text.name=t5"]) == [
        "encoders.text.name: unknown key; did you mean class_name? (the class of what `path` or `config` describe)"
    ]
    assert problems(["mode.name=x"]) == ["mode: unknown key; did you mean model, encoders?"]


def test_a_misplaced_key_names_its_section():
    with pytest.raises(UserError) as caught:
        load_run(DIGITS, ["train.seed=-1", "data.fps=0"])
    assert caught.value.problems == (
        f"{DIGITS} with --set: data.fps is 0, and a number above 0 was expected",
        f"{DIGITS} with --set: train.seed is -1, and 0 or more was expected",
    )
    assert problems(["train.lr=1"]) == ["train.lr: unknown key; did you mean strategy.optimizer.lr?"]


def test_all_problems_of_values_are_reported_at_once():
    assert problems(["train.steps=-1", "strategy.optimizer.name=adam", "output=null"]) == [
        "strategy.optimizer.name is 'adam', which is unknown; did you mean adamw?",
        "train.steps is -1, and 1 or more was expected",
        "output is null, and a path was expected",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("strategy.micro_batch_size=true", "strategy.micro_batch_size is true, and a whole number was expected"),
        ("train.steps=8.0", "train.steps is 8.0, and a whole number was expected"),
        ("train.steps='8'", "train.steps is '8', and a whole number was expected"),
        ("strategy.offload_activations=1", "strategy.offload_activations is 1, and true or false was expected"),
        ("train.seed=-1", "train.seed is -1, and 0 or more was expected"),
        (f"train.seed={2**63}", f"train.seed is {2**63}, and {2**63 - 1} or less was expected"),
        ("strategy.checkpointed_blocks=some", "strategy.checkpointed_blocks is 'some', and a whole number or all was "
         "expected"),
        ("strategy.checkpointed_blocks=-1", "strategy.checkpointed_blocks is -1, and 0 or more or all was expected"),
        ("strategy.checkpointed_segments={blocks: 3, every: 2}", "strategy.checkpointed_segments: every is 2, and "
         "segments have 3 blocks; set it to as many or more"),
        ("strategy.ema={decay: 0.9, power: 0.1}", "strategy.ema: ema.decay is 0.9, and ema.power is 0.1; leave all but "
         "one of them out"),
        ("strategy.ema={power: 0.3}", "strategy.ema.power is 0.3, and a number below 0.288 was expected"),
        ("strategy.ema=0.9", "strategy.ema is 0.9, and keys such as decay, power, widths, device were expected"),
        ("strategy.ema={widths: [0.1, 0.1]}", "strategy.ema: ema.widths is [0.1, 0.1]; each must differ"),
        ("strategy.ema={widths: [0.05]}", "strategy.ema.widths is [0.05], and a list of at least 2 was expected"),
        ("train=null", "train is null, and keys such as steps, epochs, warmup_steps, lr_schedule, decay_steps, "
         "min_lr were expected"),
        ("train.steps=null", "train: steps and epochs are both missing; set one of them"),
        ("train.epochs=2.5", "train: steps is 800 and epochs 2.5, and only one may be set; leave one of them out, or "
                             "set it to null"),
        ("train.epochs=0", "train.epochs is 0, and a number above 0 was expected"),
        ("train.epochs=1e7", "train.epochs is '1e7', and 1000000 or less was expected"),
        ("strategy.optimizer.lr=.inf", "strategy.optimizer.lr is inf, and a finite number was expected"),
        ("strategy.optimizer.lr=.nan", "strategy.optimizer.lr is nan, and a finite number was expected"),
        ("strategy.optimizer.lr=true", "strategy.optimizer.lr is true, and a number was expected"),
        ("strategy.optimizer.lr=fast", "strategy.optimizer.lr is 'fast', and a number was expected"),
        ("strategy.optimizer.lr=0", "strategy.optimizer.lr is 0, and a number above 0 was expected"),
        ("validation.times=[0]", "validation.times.0 is 0, and a number above 0 was expected"),
        ("validation.times=[0.5, 1]", "validation.times.1 is 1, and a number below 1 was expected"),
        ("data.read_threads=0", "data.read_threads is 0, and 1 or more was expected"),
        ("strategy.optimizer.betas=[0.9, 1]", "strategy.optimizer.betas.1 is 1, and a number below 1 was expected"),
        ("strategy.optimizer.betas=[0.9]", "strategy.optimizer.betas is [0.9], and a list of 2 was expected"),
        ("strategy.optimizer.betas=[]", "strategy.optimizer.betas is [], and a list of 2 was expected"),
        ("strategy.optimizer.betas=0.9", "strategy.optimizer.betas is 0.9, and a list was expected"),
        ("strategy.world_size=100000", "strategy.world_size is 100000, and 4096 or less was expected"),
        ("train.timeout=.inf", "train.timeout is inf, and a finite number was expected"),
        ("data.images=5", "data.images: it is a path, or a mapping with path; 5 was found"),
        ("data.images=[]", "data.images: the list is empty; name a source, such as a folder of images"),
        ("data.images={path: a, captions: {b: true}}", "data.images.captions: the weight of b is a number from 1.2e-38 "
         "to 3.4e+38, or a column; True was found"),
        ("strategy.cp_ring=true", "strategy.cp_ring is true, and a number was expected"),
        ("data.first_frame_noise={mean: 1000}", "data.first_frame_noise.mean is 1000, and 2 or less was expected"),
        ("data.buckets=[[8]]", "data.buckets.0 is [8], and a list of at least 2 was expected"),
        ("data.buckets=[[8, 8, 8, 8]]", "data.buckets.0 is [8, 8, 8, 8], and a list of 3 was expected"),
        ("data.buckets=[[9, 8, 8]]", "data: buckets has 9 × 8 × 8 of videos, and fps is missing; set it to the frames "
                                     "per second that the model is trained at, such as 16 of Wan, 8 of CogVideoX or "
                                     "25 of LTX-Video"),
        ("data.fps=8", "data: fps is 8, and buckets has no frames; give [frames, height, width], such as [17, 8, 8], "
         "or leave fps out"),
        ("data.buckets=[]", "data.buckets is [], and a list of at least 1 was expected"),
        ("data.buckets=[[8, 99998]]", "data.buckets.0.1 is 99998, and 65535 or less was expected"),
        ("data.remote_cache=much", "data.remote_cache is 'much', and a size such as 16GiB was expected"),
        ("encoders.image=5", "encoders.image is 5, and keys such as name, factor, color, class_name, path, config "
         "were expected"),
        ("encoders.image={}", "encoders.image is {}, and a mapping with a name was expected"),
        ("encoders.image.name=foo", "encoders.image.name is 'foo', which is unknown; known: identity, vae"),
        ("model.kwargs=5", "model.kwargs is 5, and a mapping of keys to values was expected"),
        ("model.kwargs={1: 2}", "model.kwargs.1: a key must be text; put quotes around it"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_taken_is_one_line_in_the_words_of_the_config(override, line):
    assert problems([override]) == [line]


def test_a_number_may_be_written_as_yaml_reads_it():
    run = load_run(
        DIGITS, ["strategy.optimizer.lr=1e-4", "strategy.optimizer.weight_decay=0", "strategy.optimizer.betas=[0, 0.5]"]
    )
    assert (run.strategy.optimizer.lr, run.strategy.optimizer.weight_decay, run.strategy.optimizer.betas) == (
        1e-4,
        0.0,
        (0.0, 0.5),
    )


def test_all_contradictions_are_reported_at_once():
    found = problems(["encoders.image.color=rgb", "data.buckets=[[8, 9]]", "encoders.text.config.d_model=32"])
    assert found == [
        "encoders.image gives 12 channels (factor 2, rgb), and the model's in_channels is 4; set encoders.image.color "
        "to gray",
        "data.buckets: 8 × 9 does not divide by 2 (factor × patch_size); nearest: 8 × 8",
        "encoders.text.config.d_model is 32, and the model's caption_channels is 64",
    ]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("train.warmup_steps=9",), ["train.warmup_steps is 9, beyond train.steps 8"]),
        (("train.lr_schedule=wsd",), ["train.decay_steps is missing, and train.lr_schedule is wsd; only wsd has it, "
                                      "and needs it"]),
        (("train.lr_schedule=cosine", "train.decay_steps=2"), ["train.decay_steps is 2, and train.lr_schedule is "
         "cosine; only wsd has it, and needs it"]),
        (("train.lr_schedule=wsd", "train.decay_steps=7", "train.warmup_steps=2"), ["train.decay_steps is 7, and "
         "train.warmup_steps 2 leave 6 of train.steps 8 to it"]),
        (("train.lr_schedule=constant", "train.min_lr=1e-5"), ["train.min_lr is 1e-05, and train.lr_schedule is "
         "constant; cosine and wsd fall to it"]),
        (("train.lr_schedule=cosine", "train.min_lr=1"), ["train.min_lr is 1, above strategy.optimizer.lr 0.001, "
         "which falls to it"]),
        (("train.lr_schedule=linear",), ["train.lr_schedule is 'linear', which is unknown; did you mean "
         "cosine? (to train.min_lr)"]),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_names_its_key(overrides, lines):
    assert problems(["train.steps=8", "train.warmup_steps=0", "strategy.optimizer.lr=1e-3", *overrides]) == lines


def test_an_impossible_batch_is_a_line():
    assert problems(["strategy.grad_accum_steps=2"]) == [
        "strategy: global_batch_size is 32 and grad_accum_steps 2, and one follows from the other; leave one out"
    ]
    assert problems(["strategy.global_batch_size=some"]) == [
        "strategy: global_batch_size is 'some', and a whole number of 1 or more was expected"
    ]


def test_fsdp2_refuses_bitsandbytes():
    found = problems(["strategy.engine=fsdp2", "strategy.ds_config=null", "strategy.optimizer.name=adamw_8bit"])
    assert found == [
        "strategy: optimizer.name adamw_8bit (bitsandbytes) cannot step FSDP2's sharded DTensors; "
        "use optimizer.name adamw_8bit_ao, or engine deepspeed"
    ]


CANNOT_STEP = {
    "prodigy; engine=deepspeed": "optimizer.name prodigy keeps state that all weights share, and DeepSpeed steps "
    "groups of them by turns; use engine fsdp2 or single",
    "muon; engine=deepspeed": "optimizer.name muon multiplies whole matrices, and DeepSpeed gives an optimizer flat "
    "partitions; use engine fsdp2 or single",
    "muon; engine=fsdp2 cpu_offload=true": "optimizer.name muon multiplies matrices in every step, which with "
    "cpu_offload is left to the CPU; set cpu_offload to false, or use optimizer.name adamw",
    "adamw_schedulefree; engine=fsdp2 ema={}": "optimizer.name adamw_schedulefree averages the weights itself, and "
    "exports its average; set ema to null",
    "muon; engine=fsdp2 precision=bf16_sr": "optimizer.name muon rounds to nearest, and precision bf16_sr needs "
    "stochastic rounding; use optimizer.name adamw or adamw_8bit_ao or adamw_4bit_ao or adafactor or came or came_8bit",
    "prodigy; engine=fsdp2 optimizer_in_backward=true gradient_clipping=null": "optimizer_in_backward steps weights "
    "one after the other, and optimizer.name prodigy needs all gradients at once; set optimizer_in_backward to false",
}


@pytest.mark.parametrize("given", CANNOT_STEP)
def test_strategies_that_an_optimizer_cannot_step(given):
    optimizer, rest = given.split("; ")
    own = [f"strategy.{each}" for each in (f"optimizer.name={optimizer}", *rest.split())]
    others = [] if "deepspeed" in rest else ["strategy.ds_config=null"]
    assert problems([*own, *others]) == [f"strategy: {CANNOT_STEP[given]}"]


def test_keys_of_one_optimizer_are_refused_for_others():
    assert problems(["strategy.optimizer.d_coef=2"]) == [
        "strategy.optimizer: d_coef is for the optimizer prodigy, and name is adamw"
    ]
    schedule = "strategy.optimizer.name=adamw_schedulefree"
    assert problems([schedule, "strategy.engine=fsdp2", "strategy.ds_config=null"]) == [
        "train.lr_schedule is cosine, and strategy.optimizer.name adamw_schedulefree averages weights instead of "
        "lowering the rate; set train.lr_schedule to constant (train.warmup_steps may stay)"
    ]
    assert problems([schedule, "strategy.optimizer.betas=[0, 0.9]"]) == [
        "strategy.optimizer: betas has 0 first, by which adamw_schedulefree divides; 0.9 is usual"
    ]


@pytest.mark.parametrize(("given", "lr"), [("", 1.0), (", lr: 0.5", 0.5)])
def test_prodigy_without_a_rate_has_its_usual_one(given, lr):
    run = load_run(DIGITS, [*ALONE, f"strategy.optimizer={{name: prodigy{given}}}", "strategy.world_size=1"])
    assert run.strategy.optimizer.lr == lr


def test_pixels_of_no_fitting_number_of_channels_name_what_fits():
    (found,) = problems(["encoders.image.factor=8", "encoders.image.color=rgb", "data.buckets=[[8, 8]]"])
    assert found == (
        "encoders.image gives 192 channels (factor 8, rgb), and the model's in_channels is 4; set encoders.image to "
        "the model's VAE (name: vae, class_name, path), or, for pixels, its factor to 2 and its "
        "color to gray"
    )


ALONE = ("strategy.engine=single", "strategy.ds_config=null", "strategy.global_batch_size=null")


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("strategy.world_size=2",), ["strategy: engine single runs one process, and world_size is 2; use engine "
         "fsdp2, deepspeed or ddp, or set world_size to 1"]),
        (("strategy.lora={}", "model.init_from=/weights"), ["strategy: lora.base bf16 computes in bf16, and "
         "precision is fp32; use precision bf16, or lora.base int8, fp8 or nf4"]),
        (("strategy.blocks_to_swap=2", "strategy.lora={base: nf4}", "model.init_from=/weights"), ["strategy: "
         "blocks_to_swap is 2, and the weights of two blocks are on the device at any time; set it to 3 or more, or "
         "to 0"]),
        (("strategy.blocks_to_swap=3",), ["strategy: blocks_to_swap keeps weights in CPU memory, and trained "
         "ones must be stepped while they are on the device, without masters: precision is fp32 and "
         "optimizer_in_backward is false; set precision to bf16_sr and optimizer_in_backward to true, or set lora",
         "strategy: blocks_to_swap is 3, and checkpointed_blocks is 0: weights of a swapped block come again when it "
         "is recomputed; set checkpointed_blocks to 3 or more, or all"]),
        (("strategy.blocks_to_swap=3", "strategy.lora={}", "model.init_from=/weights", "strategy.precision=bf16",
          "strategy.checkpointed_segments.blocks=2"), ["strategy: blocks_to_swap has two blocks on the device at any "
         "time, each recomputed by itself; leave checkpointed_segments out"]),
    ],
)  # fmt: skip
def test_what_of_a_strategy_excludes_what_is_a_line_each(overrides, lines):
    assert problems([*ALONE, "strategy.world_size=1", *overrides]) == lines


def test_other_processes_than_those_of_the_run_are_reported_by_their_variable():
    with pytest.raises(
        UserError, match=r"strategy\.world_size is 1, and 2 processes run \(WORLD_SIZE\); start that many"
    ):
        load_stages(DIGITS, [*ALONE, "strategy.world_size=1"], 2)


def test_a_key_that_is_missing_is_reported_by_what_it_is():
    assert problems(["encoders.image={name: vae, path: vae}"]) == [
        "encoders.image.class_name: missing (the class of the VAE in diffusers)"
    ]


def test_features_are_cached_somewhere_or_nowhere():
    assert problems(["data.features=null"]) == ["data.features is missing; name the folder that `bigdit extract` fills"]
    for key in ("data.features", "output"):
        line = f"{key} is pics, which data.images names too; name a folder of its own"
        assert problems(["data.images=./pics/", f"{key}=pics"]) == [line]
    assert problems(["strategy.features=online"]) == [
        "data.features is demo/features, and strategy.features is online; leave data.features out"
    ]


def test_ds_config_and_run_config_must_agree(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "Adam"},
                "zero_optimization": {"stage": 4},
            }
        )
    )
    found = problems([f"strategy.ds_config={path}"])
    assert found == [
        "strategy: ds_config.optimizer: strategy.optimizer of the run sets this; remove it from ds_config",
        'strategy: ds_config.train_micro_batch_size_per_gpu is 8, and micro_batch_size makes it 16; use "auto"',
        "strategy: ds_config.zero_optimization.stage is 4; it is 0, 1, 2 or 3",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "run.yaml is a list, and a mapping of sections such as model, data and train was expected"),
        ("", "run.yaml is empty, and a mapping of sections"),
        ("a: [", "is not YAML"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(path)


def test_keys_of_another_trainer_come_in_the_place_of_missing_sections(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train_batch_size: 1\n")
    with pytest.raises(UserError) as refused:
        load_run(path)
    lines = [line.removeprefix(f"{path}: ") for line in refused.value.problems]
    none, meant = lines
    assert none.startswith("it has none of model, data, encoders, train, output; `bigdit init` writes a run.yaml")
    assert meant.startswith("train_batch_size: unknown key; did you mean strategy.micro_batch_size?")


def test_set_needs_a_key_and_a_value():
    assert problems(["train.steps"]) == [
        "--set expects key.path=value, such as train.steps=100, and 'train.steps' was found"
    ]


def test_one_way_to_name_the_model():
    assert problems(["model.name=sana-600m"]) == [
        "exactly one of model.name, model.path and model.class_name was expected; "
        "model.name and model.class_name were found"
    ]


def test_what_is_drawn_on_the_way_begins_with_images_where_the_run_does():
    drawn = ["data.buckets=[[9, 8, 8]]", "data.fps=8", "samples.captions=[a one, a two, a six]"]
    for images, count in (("[]", 0), ("[a.png, b.png]", 2)):
        found = problems([*drawn, "encoders.first_frame={}", f"samples.images={images}"])
        printed = f"samples.images has {count} for 3 of samples.captions, and encoders.first_frame needs an image"
        assert f"{printed} for each video; name one for all, or one for each" in found
    for images in ("[a.png]", "[a.png, b.png, c.png]"):
        load_and_check([*drawn, "encoders.first_frame={}", f"samples.images={images}"])
    found = problems([*drawn, "samples.images=[a.png]"])
    assert (
        "samples.images is set, and encoders.first_frame, data.references and data.fill are not; leave it out" in found
    )
