"""From a person's input to a request: what is accepted, and all that is refused, at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigdit
from bigdit import catalog
from bigdit.catalog.models import ASPECTS, aspect_sizes, models
from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.search.plan import Constraints, ResolvedRequest
from bigdit.search.resolve import resolve_request
from bigdit.speed.seconds import Cluster
from bigdit.strategy import MOST_GPUS
from bigdit.strategy.values import MOST_RANK
from bigdit.units import GIB, MIB, parse_sizes, size_text

SANA = "sana-1600m-1024"


def problems(model="sana-1600m", gpu="a40", **options):
    with pytest.raises(UserError) as error:
        resolve_request(model, gpu, **options)
    return error.value.problems


def test_what_is_left_out_is_as_the_request_has_it():
    asked = resolve_request("sana-1600m", "a40", buckets="none")
    own = {"model": catalog.model(SANA), "gpu": catalog.gpu("a40"), "resolution": (1024, 1024)}
    assert asked == ResolvedRequest(**own, host_assumed=True)
    assert (asked.cluster, asked.constraints) == (Cluster(), Constraints())


@pytest.mark.parametrize(
    ("gpu", "reserve", "kept"),
    [
        ("rtx-4090", None, 512 * MIB),
        ("rtx-a6000", None, 512 * MIB),
        ("a40", None, 0),
        ("h100-sxm", None, 0),
        ("rtx-4090", "1GiB", GIB),
        ("a40", "700MiB", 700 * MIB),
        ("rtx-4090", "0", 0),
        ("rtx-4090", 0, 0),
    ],
)
def test_what_is_reserved_is_not_usable(gpu, reserve, kept):
    """By the kind of GPU, unless a value is given. What a process is told stays the driver's."""
    asked, device = resolve_request("sana-1600m", gpu, reserve=reserve).gpu, catalog.gpu(gpu)
    assert (asked.reserved_bytes, asked.driver_bytes) == (kept, device.driver_bytes)
    assert asked.usable_bytes == device.usable_bytes - kept


def test_adapters_have_weights_to_adapt():
    (problem,) = problems(from_scratch=True, lora=16)
    assert problem.startswith("--from-scratch and --lora were given, ")
    (problem,) = problems(from_scratch=True, controlnet=2)
    assert problem.startswith("--from-scratch and --controlnet were given, ")
    assert resolve_request("sana-1600m", "a40", from_scratch=True).from_scratch


def test_what_is_reserved_leaves_something():
    for reserve in ("30GiB", f"{catalog.gpu('rtx-4090').driver_bytes}B"):
        (problem,) = problems(gpu="rtx-4090", reserve=reserve)
        assert problem == f"--reserve {reserve} leaves nothing of the rtx-4090, which has 23.60 GiB"
    (problem,) = problems(reserve="512")
    assert problem.startswith("--reserve: a memory size with a unit was expected")


def test_the_host_is_this_machine_s_or_the_usual_one(monkeypatch):
    assert resolve_request("sana-1600m", "a40").host_memory_bytes == 64 * GIB
    assert resolve_request("sana-1600m", "h100-sxm").host_memory_bytes == 256 * GIB
    assert resolve_request("sana-1600m", "a40", gpus=4).host_memory_bytes == 256 * GIB
    assert resolve_request("sana-1600m", "a40", gpus=32).host_memory_bytes == 512 * GIB
    assert resolve_request("sana-1600m", "a40", gpus=32, host_memory="1TiB").host_memory_bytes == 1024 * GIB
    more = resolve_request("sana-1600m", "a40").over(Cluster(gpus=4))
    assert (more.cluster.gpus, more.host_memory_bytes) == (4, 256 * GIB)
    assert resolve_request("sana-1600m", "a40", host_memory="96GiB").over(Cluster(gpus=4)).host_memory_bytes == 96 * GIB
    monkeypatch.setattr("bigdit.catalog.machine.found_gpus", lambda: [catalog.gpu("a40")])
    own = memory_bytes()
    found = resolve_request("sana-1600m", "auto")
    assert (found.host_memory_bytes, found.host_assumed) == (own, False)
    assert resolve_request("sana-1600m", "a40").host_assumed
    assert not resolve_request("sana-1600m", "a40", host_memory="96GiB").host_assumed
    for slip, printed in (
        ("0GiB", "0GiB is 0 B, and machines and GPUs have 1 GiB to 1024 TiB"),
        ("64B", "64B is 64 B, and machines and GPUs have 1 GiB to 1024 TiB; did you mean 64GiB?"),
        ("512 MB", "512 MB is 0.48 GiB, and machines and GPUs have 1 GiB to 1024 TiB; did you mean 512GiB?"),
        (
            "64000TB",
            "64000TB is 59604644.78 GiB, and machines and GPUs have 1 GiB to 1024 TiB; did you mean 64000GiB?",
        ),
    ):
        assert problems(host_memory=slip) == (f"--host-memory: {printed}",)
    (problem,) = problems(host_memory="much")
    assert (
        problem
        == "--host-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and 'much' was found"
    )


def test_every_option_arrives(tmp_path):
    asked = resolve_request(
        "sana-1600m",
        "a40",
        gpu_memory="40000MiB",
        gpus=16,
        gpus_per_node=4,
        network=25,
        resolution=["512,480x832", "1024"],
        buckets="768x512",
        global_batch=256,
        images="1.5k",
        host_memory="205GiB",
        epochs=2.5,
        price=0.5,
        receipts=str(tmp_path),
        engine="zero3-offload",
        optimizer="adamw_8bit",
        precision="fp16",
        checkpointed_blocks="12",
        micro_batch=4,
        ema="cpu",
        ema_widths="0.05,0.1",
        features="online",
        full=True,
    )
    assert asked.gpu.usable_mib == 40000
    assert asked.cluster == Cluster(gpus=16, gpus_per_node=4, network_gbs=25)
    assert asked.cluster.nodes == 4
    assert asked.host_memory_bytes == 205 * GIB
    assert asked.resolution == (512, 512)
    assert asked.buckets == ((480, 832), (1024, 1024), (768, 512))
    assert (asked.global_batch_size, asked.images, asked.epochs, asked.price) == (256, 1500, 2.5, 0.5)
    assert asked.receipts == tmp_path
    assert asked.constraints == Constraints(
        engine="zero3-offload",
        optimizer="adamw_8bit",
        precision="fp16",
        checkpointed_blocks=12,
        micro_batch_size=4,
        ema="cpu",
        ema_widths=(0.05, 0.1),
        features="online",
        full=True,
    )
    assert resolve_request("sana-600m", "a40", ema_widths="0.05,0.1").constraints.ema == "auto"


@pytest.mark.parametrize(("asked", "count"), [("30M", 30_000_000), ("1.5k", 1500), ("250_000", 250_000), (7, 7)])
def test_images_are_counted_as_people_count(asked, count):
    assert resolve_request("sana-600m", "a40", images=asked).images == count


def test_a_video_has_the_frames_of_its_clip():
    asked = resolve_request("wan2.1-t2v-1.3b", "a100-80g-sxm")
    assert (asked.resolution, asked.frames) == ((480, 832), 81)
    assert resolve_request("wan2.1-t2v-1.3b", "a100-80g-sxm", frames=49).frames == 49


def test_the_usual_aspect_ratios_keep_the_area():
    asked = resolve_request("sana-1600m", "a40")
    assert asked == resolve_request("sana-1600m", "a40", buckets="aspect")
    assert asked.resolution == (1024, 1024)
    assert asked.buckets == ((896, 1184), (1184, 896), (768, 1376), (1376, 768))


def test_models_of_squares_alone_say_so():
    assert resolve_request("dit-s-8", "rtx-3060-12g").buckets == ()
    assert problems("dit-s-8", "rtx-3060-12g", resolution="256x512") == (
        "--resolution 256x512: dit-s-8 takes only squares, and 256 × 512 was asked for; nearest: 256 × 256",
    )


@given(st.sampled_from([SANA, "pixart-sigma-xl-2-512", "flux.1-dev", "sd3.5-medium"]), st.integers(4, 64))
def test_aspect_sizes_are_what_the_model_takes(name, multiples):
    model = catalog.model(name)
    multiple = model.vae.downsample * model.patch_size
    size = (multiples * multiple, multiples * multiple)
    for (height, width), (wide, high) in zip(aspect_sizes(model, size), ASPECTS, strict=True):
        catalog.latent_shape(model, height, width)
        assert abs(height - size[0] * (high / wide) ** 0.5) <= multiple / 2
        assert abs(width - size[1] * (wide / high) ** 0.5) <= multiple / 2


@given(st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999)), min_size=1))
def test_sizes_read_as_they_are_written(sizes):
    assert parse_sizes("--resolution", ",".join(map(size_text, sizes))) == tuple(sizes)
    assert parse_sizes("--resolution", list(sizes)) == tuple(sizes)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"model": "sana-160m"},
            "--model 'sana-160m' is not in the catalogue; did you mean sana-1600m-1024, sana-600m-1024, "
            "sana-1600m-512, sana-1.5-1600m-1024? "
            "(`bigdit models` lists all)",
        ),
        (
            {"gpu": "a4"},
            "--gpu 'a4' is not in the catalogue; did you mean a40, rtx-a4000, rtx-a4500? (`bigdit gpus` lists all)",
        ),
        (
            {"gpu": "8xA40"},
            "--gpu '8xA40' is not in the catalogue: it is a number of GPUs: use --gpus; nearest: a40",
        ),
        ({"model": "no/config.json"}, "--model: no/config.json does not exist; a diffusers config.json was expected"),
        ({"gpus": 0}, "--gpus is 0, and 1 or more was expected"),
        ({"gpus_per_node": -8}, "--gpus-per-node is -8, and 1 or more was expected"),
        ({"network": 0}, "--network is 0, and a number above 0 was expected"),
        ({"global_batch": -1}, "--global-batch is -1, and 1 or more was expected"),
        ({"micro_batch": 0}, "--micro-batch is 0, and 1 or more was expected"),
        ({"price": 0.0}, "--price is 0.0, and a number above 0 was expected"),
        ({"epochs": -1}, "--epochs is -1, and a number above 0 was expected"),
        ({"epochs": float("inf")}, "--epochs is inf, and a finite number was expected"),
        ({"images": 0}, "--images is 0, and 1 or more was expected"),
        ({"images": "many"}, "--images expects a number such as 250000, 1.5k or 30M, and 'many' was found"),
        ({"images": "0.5"}, "--images expects a number such as 250000, 1.5k or 30M, and '0.5' was found"),
        (
            {"receipts": "no/such"},
            "--receipts: no/such is no folder; one with receipts of training was expected",
        ),
        (
            {"host_memory": "64"},
            "--host-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and '64' was found",
        ),
        ({"lora": 0}, "--lora is 0, and 1 or more was expected"),
        (
            {"model": "flux.1-dev", "lora_text_encoders": True},
            "--lora-text-encoders needs LoRA, and --lora is missing; add --lora 16",
        ),
        (
            {"lora": 4, "lora_text_encoders": True, "features": "online"},
            "--lora-text-encoders is for the CLIP encoders of SD3 and Flux.1, and the model is a "
            "SanaTransformer2DModel; leave it out",
        ),
        (
            {"model": "flux.1-dev", "lora": 4, "lora_text_encoders": True},
            "--lora 4: lora.text_encoders is true, and features is cached: the encoders run in "
            "no step; set it to online",
        ),
        ({"engine": "zero"}, "--engine is 'zero', which is unknown; did you mean zero3, zero2, zero1?"),
        (
            {"optimizer": "adamw8bit"},
            "--optimizer is 'adamw8bit', which is unknown; did you mean adamw_8bit?",
        ),
        ({"precision": "fp8"}, "--precision is 'fp8', which is unknown; did you mean fp32, fp16?"),
        ({"ema": "ram"}, "--ema is 'ram', which is unknown; known: auto, cpu, gpu, none"),
        ({"ema_widths": "0,0.1"}, "--ema-widths is '0', and a number above 0 was expected"),
        ({"ema_widths": "0.1"}, "--ema-widths is 0.1, and two widths or more were expected, such as 0.05,0.1"),
        (
            {"ema": "none", "ema_widths": "0.05,0.1"},
            "--ema-widths were given, and --ema none keeps no EMA; leave one of them out",
        ),
        ({"features": "on"}, "--features is 'on', which is unknown; did you mean online?"),
        (
            {"checkpointed_blocks": "some"},
            "--checkpointed-blocks is 'some', and a whole number or all was expected",
        ),
        ({"checkpointed_blocks": -1}, "--checkpointed-blocks is -1, and 0 or more or all was expected"),
        (
            {"checkpointed_blocks": 21},
            "--checkpointed-blocks is 21, and sana-1600m-1024 has 20 blocks; use 20 or all",
        ),
        (
            {"resolution": "big"},
            "--resolution expects pixels such as 1024 or 480x832 (height x width), and 'big' was found",
        ),
        (
            {"resolution": (1024, 0)},
            "--resolution expects pixels such as 1024 or 480x832 (height x width), and '1024x0' was found",
        ),
        (
            {"resolution": 1000},
            "--resolution 1000: a side is 1000, but sana-1600m-1024 takes multiples of 32 (VAE 32 × patch 1); "
            "nearest: 992 or 1024",
        ),
        (
            {"buckets": "1024x1000"},
            "--buckets 1024x1000: the width is 1000, but sana-1600m-1024 takes multiples of 32 (VAE 32 × patch 1); "
            "nearest: 992 or 1024",
        ),
        ({"frames": 5}, "--frames: sana-1600m-1024 makes images, and 5 frames were asked for"),
        (
            {"model": "wan2.1-t2v-1.3b", "gpu": "a100-80g-sxm", "frames": 12},
            "--frames: wan2.1-t2v-1.3b takes 1 frame and then multiples of 4 (VAE), and frames is 12; the nearest that "
            "fit: 9 or 13",
        ),
        (
            {"gpus": 12},
            "--gpus is 12, but must be a multiple of --gpus-per-node 8; nearest: 8 or 16",
        ),
        ({"gpus": 2 * MOST_GPUS}, "--gpus is 8192, and plans go up to 4096"),
        (
            {"gpus": 2, "gpu": "a100-80g-sxm:3g.40gb"},
            "--gpus is 2, and NCCL joins no MIG slices (a100-80g-sxm:3g.40gb); use --gpus 1, or whole GPUs",
        ),
        (
            {"gpus": 2, "engine": "single"},
            "--engine single runs on one GPU, and --gpus is 2; use --engine ddp, zero1, zero2, zero3 or "
            "fsdp2, or --gpus 1",
        ),
        (
            {"engine": "ddp"},
            "--engine ddp needs several GPUs, and --gpus is 1; use --gpus 2 or more, or --engine single",
        ),
        (
            {"full": True, "lora": 16},
            "--full is full fine-tuning, and --lora 16 trains adapters; leave one of them out",
        ),
        (
            {"full": True, "controlnet": 2},
            "--full is full fine-tuning, and --controlnet trains a ControlNet; leave one of them out",
        ),
        (
            {"controlnet": 2, "features": "online"},
            "--features online: samples with a reference or a first frame need features cached; use that",
        ),
        (
            {"controlnet": "4,1,2"},
            "--controlnet is 4,1,2, and one or two numbers were expected, such as 4 or 4,10",
        ),
        ({"controlnet": "4,x"}, "--controlnet is 'x', and a whole number was expected"),
        (
            {"model": "flux.1-dev", "controlnet": "4,39"},
            "--controlnet: single_layers is 39, and flux.1-dev has 38 such blocks; set it to 38 or less",
        ),
        (
            {"model": "flux.1-kontext-dev", "controlnet": 4},
            "--controlnet: flux.1-kontext-dev takes an image itself, and ControlNets are for models that take only "
            "text; name its base",
        ),
        (
            {"controlnet": 2, "lora": 8},
            "--lora 8, --controlnet: lora and controlnet are both set, and a run trains only one; leave the other out",
        ),
        (
            {"gpu": "v100-32g-sxm2", "precision": "bf16"},
            "--precision: Tesla V100-SXM2-32GB computes no bf16 (compute capability 7.0), and precision is bf16; fp16 "
            "and fp32 fit it",
        ),
        (
            {"gpus": 4, "engine": "fsdp2", "optimizer": "adamw_8bit"},
            "--engine fsdp2, --optimizer adamw_8bit: optimizer.name adamw_8bit (bitsandbytes) "
            "cannot step FSDP2's sharded DTensors; use optimizer.name adamw_8bit_ao, or engine deepspeed",
        ),
        (
            {"engine": "zero2", "precision": "bf16_sr"},
            "--engine zero2, --precision bf16_sr: precision bf16_sr has no master weights, which "
            "DeepSpeed's ZeRO keeps; use precision bf16",
        ),
        (
            {"gpu": "v100-32g-sxm2", "gpus": 8, "lora": 8, "engine": "zero2"},
            "--engine zero2, --lora 8: lora.base bf16 computes in bf16, and precision is "
            "fp16; use precision bf16, or lora.base int8, fp8 or nf4; or: lora.base int8 keeps packed weights, "
            "which deepspeed cannot shard; use lora.base bf16, or engine ddp or fsdp2; or: lora.base nf4 keeps "
            "packed weights, which deepspeed cannot shard; use lora.base bf16, or engine ddp",
        ),
    ],
)
def test_what_is_wrong_is_one_line(options, line):
    assert problems(**options) == (line,)


def test_unknown_encoders_are_named_where_they_are_wanted():
    (line,) = problems("flux.2-klein-9b", "b200", features="online")
    assert line.startswith(
        "--features online: flux.2-klein-9b cannot be planned with features online: the catalogue has"
    )
    assert resolve_request("flux.2-klein-9b", "b200").constraints.features == "cached"


def test_all_that_is_wrong_is_reported_at_once():
    found = problems(
        "sana-160m", "a4", gpus=0, global_batch=-1, price=-2, optimizer="adamw8", images="x", resolution="1024x"
    )
    assert [line.split()[0].rstrip(":") for line in found] == [
        "--model",
        "--gpu",
        "--resolution",
        "--images",
        "--gpus",
        "--optimizer",
        "--global-batch",
        "--price",
    ]


def test_contradictions_are_reported_next_to_what_is_unknown():
    found = problems("sana-1600m", "a4", gpus=12, engine="single", checkpointed_blocks=99, frames=3)
    assert [line.split()[0].rstrip(":") for line in found] == [
        "--gpu",
        "--frames",
        "--checkpointed-blocks",
        "--gpus",
        "--engine",
    ]


def test_adapters_over_a_quantised_base_need_no_bf16():
    assert resolve_request("sana-600m", "v100-32g-sxm2", lora=8).constraints.lora.rank == 8


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"micro_batch": 1_000_000}, "--micro-batch is 1000000, and 4096 or less was expected"),
        ({"lora": 100_000}, "--lora is 100000, and 8192 or less was expected"),
        ({"micro_batch": True}, "--micro-batch is true, and a whole number was expected"),
        ({"gpus": 10**30}, f"--gpus is {10**30}, and {2**63 - 1} or less was expected"),
        ({"images": "9" * 400}, f"--images expects a number such as 250000, 1.5k or 30M, and {'9' * 40!r} was found"),
        ({"explain": 5}, "--explain is 5, and true or false was expected"),
        ({"receipts": 5}, "--receipts is 5, and a text was expected"),
        (
            {"resolution": "9" * 5000},
            f"--resolution expects pixels such as 1024 or 480x832 (height x width), and {'9' * 40!r} was found",
        ),
        (
            {"resolution": "99998x99998"},
            "--resolution expects pixels such as 1024 or 480x832 (height x width), 65535 a side at most, and "
            "'99998x99998' was found",
        ),
    ],
)
def test_what_is_beyond_all_sense_is_refused_at_once(options, line):
    assert problems(**options) == (line,)


def test_no_rank_within_the_limit_is_wider_than_the_widest_layer():
    """In the catalogue: no honest request reaches the limit."""
    widths = [
        model.spec.kwargs.get("num_attention_heads", 0) * model.spec.kwargs.get("attention_head_dim", 0)
        for model in models()
    ]
    assert 4096 < max(widths) <= MOST_RANK


@pytest.mark.parametrize(
    ("arguments", "named", "lines"),
    [
        (
            (None, None),
            {},
            (
                "model is missing; name one of `bigdit models`, or a diffusers config.json or folder",
                "no GPU was named; gpu takes one of `bigdit gpus`, or auto for this machine's own",
            ),
        ),
        ((5, 6), {}, ("model is 5, and a text was expected", "gpu is 6, and a text was expected")),
        (
            ("sana-1600m", "a40"),
            {"gpu_memory": 5},
            ("gpu_memory is 5, and a memory size with a unit was expected, such as 46068MiB or 24GB",),
        ),
        (
            ("sana-1600m", "a40"),
            {"host_memory": -1},
            ("host_memory is -1, and a memory size with a unit was expected, such as 46068MiB or 24GB",),
        ),
    ],
)
def test_wrong_arguments_of_python_speak_of_arguments(arguments, named, lines):
    with pytest.raises(UserError) as error:
        bigdit.plan(*arguments, **named)
    assert error.value.problems == lines


def test_an_argument_that_there_is_not_names_the_nearest():
    with pytest.raises(TypeError, match=r"^bigdit\.plan has no argument 'micro_bach'; did you mean micro_batch"):
        bigdit.plan("sana-1600m", "a40", micro_bach=5)


def test_gpus_that_share_samples_need_fewer_of_them():
    video = {"model": "wan2.1-t2v-14b", "gpu": "h100-sxm", "gpus": 8}
    assert resolve_request(**video).degrees == [1, 2, 4, 8]
    assert resolve_request(**video, global_batch=2).degrees == [4, 8]
    assert resolve_request(**video, global_batch=1).degrees == [8]
    assert resolve_request(**video, global_batch=12).degrees == [1, 2, 4, 8]  # some are repeated
    assert resolve_request(**video, cp=4, global_batch=1).degrees == [4]
    assert resolve_request(**video, cp=2).degrees == [2]
    assert resolve_request("wan2.1-t2v-1.3b", "h100-sxm", gpus=8).degrees == [1, 2, 4, 8]  # of 12 heads
    assert resolve_request("lumina-image-2.0", "h100-sxm", gpus=8).degrees == [1]
    for options, line in (
        ({**video, "gpus": 6, "cp": 4}, "--cp is 4, which does not divide --gpus 6"),
        ({**video, "cp": 3}, "--cp is 3, and 1, 2, 4 or 8 was expected"),
        ({"model": "qwen-image", "gpu": "h100-sxm", "gpus": 8, "cp": 2}, "--cp is 2, and latents of 16 × 166 × 166"),
        (
            {
                "model": "flux.1-dev",
                "gpu": "h100-sxm",
                "gpus": 8,
                "cp": 8,
                "resolution": "1024",
                "buckets": "1008x1040",
            },
            "--cp is 8, and latents of 16 × 126 × 130 are 4,095 tokens; set it to 1, or choose another size, or leave "
            "this one out (--buckets none)",
        ),
        ({"model": "mochi", "gpu": "h100-sxm", "gpus": 8, "cp": 2}, "how to split the tokens of Mochi"),
    ):
        with pytest.raises(UserError) as found:
            resolve_request(**options)
        assert line in found.value.problems[0]
        assert len(found.value.problems) == 1
