"""Requests from a run's stages: the YAML's values are fixed, the search chooses the others, and errors name the
YAML's keys."""

import pytest
import yaml
from commands import ROOT

from bigdit.errors import UserError
from bigdit.search.of_run import carried, overruled, requests_of
from bigdit.search.resolve import resolve_request
from bigdit.search.space import proposals
from bigdit.strategy import LoraSpec, SegmentSpec

PIXART = {
    "model": {"name": "pixart-sigma-xl-2-1024"},
    "data": {"images": "images", "features": "features", "buckets": [[1024, 1024]]},
    "encoders": {"image": {"name": "vae", "class_name": "AutoencoderKL", "path": "vae"}, "text": {"pipeline": "here"}},
    "strategy": {"global_batch_size": 32, "precision": "bf16"},
    "train": {},
    "output": "run",
}
LOW = {"data": {"buckets": [[224, 288], [256, 256]]}, "train": {"steps": 1000}, "strategy": {"micro_batch_size": 8}}
HIGH = {"plan": "not/made/yet", "train": {"steps": 100}, "strategy": {"checkpointed_blocks": "all"}}


def written(folder, *stages, **sections):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(PIXART | sections | {"stages": list(stages)}))
    return path


def asked(path, *overrides, **options):
    return requests_of(path, overrides, {"gpu": "rtx-4090", **options})


def problems(path, *overrides, **options):
    with pytest.raises(UserError) as caught:
        asked(path, *overrides, **options)
    lines = caught.value.problems
    return [line.removeprefix(f"{path}: ").removeprefix(f"{path} with --set: ") for line in lines]


def test_each_stage_is_asked_with_what_is_reported_of_it(tmp_path):
    low, high = asked(written(tmp_path, LOW, HIGH), images="10k")
    assert [each.model.name for each in (low, high)] == ["pixart-sigma-xl-2-1024"] * 2
    assert (low.resolution, low.buckets, high.resolution, high.buckets) == ((256, 256), ((224, 288),), (1024, 1024), ())
    assert (low.constraints.micro_batch_size, high.constraints.micro_batch_size) == (8, None)
    assert (low.constraints.checkpointed_blocks, high.constraints.checkpointed_blocks) == (None, "all")
    assert low.constraints.precision == "bf16"
    assert (low.constraints.engine, low.constraints.optimizer, low.constraints.ema, low.constraints.full) == (
        None,
        None,
        "none",
        True,
    )
    assert (low.global_batch_size, low.epochs, high.epochs) == (32, 3.2, 0.32)


def test_the_largest_bucket_may_be_that_of_a_source(tmp_path):
    images = ["here", {"path": "there", "buckets": [[512, 2048]]}, {"path": "small", "buckets": [[256, 256]]}]
    for first in (images[0], {"path": "here", "buckets": [[1024, 512]]}):
        data = PIXART["data"] | {"images": [first, *images[1:]]}
        (found,) = asked(written(tmp_path, data=data, train={"steps": 9}))
        own = (1024, 1024) if first == "here" else (512, 2048)  # of as many pixels, the first
        assert (found.resolution, (256, 256) in found.buckets) == (own, True)


def test_references_are_those_of_the_run(tmp_path):
    data = PIXART["data"] | {"references": 1}
    (edits,) = asked(written(tmp_path, model={"name": "flux.2-klein-4b"}, data=data, train={"steps": 9}))
    assert edits.model.references == 1


def test_epochs_are_asked_as_they_are(tmp_path):
    """For as many images as are given, or for none: the plan states these and the global batch."""
    stages = written(tmp_path, {"train": {"epochs": 2.5}}, HIGH)
    for options in ({}, {"images": "10k"}):
        assert asked(stages, **options)[0].epochs == 2.5


def test_what_validation_holds_out_is_encoded_and_not_trained_on(tmp_path):
    path = written(tmp_path, LOW, HIGH, validation={"samples": 2000})
    low, high = asked(path, images="10k")
    assert (low.images, low.validated, low.epochs, high.epochs) == (10_000, 2000, 4, 0.4)
    assert problems(path, images=2000) == ["validation.samples is 2000, and --images 2000 leaves none to train on"]


def test_a_run_without_stages_is_one_request(tmp_path):
    strategy = {"lora": {"rank": 4}, "ema": {"device": "cpu"}, "optimizer": {"name": "came"}}
    (only,) = asked(written(tmp_path, train={"steps": 9}, strategy=strategy))
    assert (only.constraints.lora.rank, only.constraints.ema, only.constraints.full, only.constraints.optimizer) == (
        4,
        "cpu",
        False,
        "came",
    )


def test_a_controlnet_is_planned_with_its_blocks_and_images(tmp_path):
    asked_for = {"layers": 4, "single_layers": 2}
    path = written(
        tmp_path,
        model={"name": "flux.1-dev", "init_from": "here"},
        data=PIXART["data"] | {"references": 1},
        train={"steps": 9},
        strategy={"controlnet": asked_for},
    )
    (found,) = asked(path)
    assert found.constraints.controlnet.model_dump(exclude={"base"}) == asked_for
    (over_int8,) = requests_of(path, ["strategy.controlnet.base=int8"], {"gpu": "rtx-4090"})
    assert (found.constraints.lora_base, over_int8.constraints.lora_base) == (None, "int8")
    assert (found.model.block_count, found.model.references, found.constraints.full) == (57 + 6, 1, False)
    (same,) = requests_of(path, ["strategy.controlnet=null", "data.references=0"], {"gpu": "rtx-4090"})
    assert resolve_request("flux.1-dev", "rtx-4090", controlnet="4,2").model == found.model != same.model
    assert problems(path, "strategy.controlnet.layers=20") == [
        "strategy.controlnet: layers is 20, and flux.1-dev has 19 such blocks; set it to 19 or less"
    ]


def test_adapters_are_planned_as_the_run_has_them(tmp_path):
    """With their kind, layers and ranks, and not as plain LoRA of the same rank."""
    adapters = {"rank": 4, "alpha": 8.0, "dora": True, "targets": ["to_q"], "ranks": {"*.0.*": 2}}
    path = written(tmp_path, train={"steps": 9}, strategy={"lora": adapters})
    (found,) = asked(path)
    assert found.constraints.lora == LoraSpec.model_validate(adapters)
    options = proposals(found)[0]
    assert all(each.strategy.lora.model_copy(update={"base": "bf16"}) == found.constraints.lora for each in options)
    assert overruled(path, ()) == []
    assert {each.strategy.base for each in proposals(asked(path, "strategy.lora={kind: loha}")[0])[0]} == {
        "bf16",
        "int8",
    }


def test_text_encoders_are_planned_with_their_learning_rate(tmp_path):
    lora = {"rank": 4, "text_encoders": True, "text_encoder_lr": 5e-6}
    path = written(
        tmp_path,
        model={"name": "flux.1-dev", "init_from": "here"},
        encoders=PIXART["encoders"] | {"text": {"pipeline": "here", "dtype": "bf16"}},
        data=PIXART["data"] | {"features": None},
        train={"steps": 9},
        strategy={"features": "online", "lora": lora},
    )
    (found,) = asked(path)
    assert found.constraints.lora == LoraSpec.model_validate(lora)
    options = proposals(found)[0]
    assert {each.strategy.blocks_to_swap for each in options} == {0}
    kept = carried(yaml.safe_load(path.read_text()), options[0].strategy)
    assert kept.lora == found.constraints.lora


def test_features_online_are_pinned_and_what_is_not_is_reported(tmp_path):
    strategy = {"features": "online", "lora": {"rank": 4, "base": "nf4", "dora": False}, "offload_activations": True}
    path = written(tmp_path, data=PIXART["data"] | {"features": None}, train={"steps": 9}, strategy=strategy)
    (only,) = asked(path)
    assert (only.constraints.features, only.constraints.lora_base) == ("online", "nf4")
    cached = "set strategy.features to cached, and run `bigdit extract` first"
    assert problems(path, "data.buckets=[[512, 512], [256, 256]]") == [
        "strategy.features is online, and data.buckets has 2: the bucket of an image is known only after all were "
        f"read; {cached}"
    ]
    assert problems(path, "encoders.text.stored=fp8") == [
        f"strategy.features is online, and encoders.text.stored is fp8, which needs a cache; leave it out, or {cached}"
    ]
    asked_for = {"checkpointing": "selective", "offload_activations": "true"}
    assert overruled(path, ["strategy.checkpointing=selective"]) == [
        f"{path}: strategy.{key} is {printed}, and the plan chooses its own value" for key, printed in asked_for.items()
    ]
    assert overruled(written(tmp_path, LOW, HIGH), ()) == []
    path = written(tmp_path, train={"steps": 9}, strategy={"compile_blocks": True, "float8": "rowwise"})
    (pinned,) = asked(path)
    assert (pinned.constraints.compile, pinned.constraints.float8, overruled(path, ())) == (True, "rowwise", [])
    path = written(tmp_path, train={"steps": 9}, strategy={"checkpointed_segments": {"every": 2}})
    (grouped,) = asked(path)
    assert grouped.constraints.checkpointed_segments == SegmentSpec(every=2)
    assert (grouped.constraints.checkpointed_blocks, overruled(path, ())) == ("all", [])


@pytest.mark.parametrize(
    ("engine", "pinned"),
    [
        ({"engine": "single"}, "single"),
        ({"engine": "fsdp2", "world_size": 4, "cpu_offload": True}, "fsdp2-offload"),
        ({"engine": "deepspeed", "world_size": 4, "ds_config": f"{ROOT}/ds_configs/zero2_bf16.json"}, "zero2"),
        ({"engine": "deepspeed"}, "zero0"),
    ],
)
def test_the_engine_is_a_preset(tmp_path, engine, pinned):
    low, _ = asked(written(tmp_path, LOW, HIGH, strategy=engine))
    assert (low.constraints.engine, low.cluster.gpus) == (pinned, engine.get("world_size", 1))


def test_what_is_wrong_is_reported_by_the_runs_keys(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    (line,) = problems(path, "stages.0.data.buckets=[[250, 250]]")
    assert line.startswith(
        "stages.0: data.buckets 250: a side is 250, but pixart-sigma-xl-2-1024 takes multiples of 16"
    )
    assert problems(path, "strategy.checkpointed_blocks=99", "stages.1.strategy.checkpointed_blocks=99") == [
        "strategy.checkpointed_blocks is 99, and pixart-sigma-xl-2-1024 has 28 blocks; use 28 or all"
    ]
    assert problems(path, "strategy.world_size=2", "strategy.engine=fsdp2", gpus=4) == [
        "strategy.world_size is 2, and --gpus 4; leave one of them out"
    ]
    (line,) = problems(path, "strategy.world_size=2", "strategy.engine=fsdp2", gpu="a100-80g-sxm:3g.40gb")
    assert line.startswith("strategy.world_size is 2, and NCCL joins no MIG slices (a100-80g-sxm:3g.40gb); set it to 1")
    assert problems(path, "model={class_name: SanaTransformer2DModel}") == [
        "model.class_name says what is trained; plans take model.name or model.path, a config.json"
    ]
    assert problems(path, "encoders.image={name: identity, factor: 2, color: rgb}") == [
        "encoders.image is identity, and plans need a VAE's latents; `bigdit train` measures this run"
    ]
    assert problems(path, "train.stepz=3") == ["train.stepz: unknown key; did you mean steps, decay_steps?"]


def test_a_key_that_set_reported_is_reported_as_training_tells_it(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    for override in ("train.seed=x", "stages.1.train.steps=x"):
        with pytest.raises(UserError) as caught:
            asked(path, override)
        assert [line.partition(": ")[0] for line in caught.value.problems] == [f"{path} with --set"]
