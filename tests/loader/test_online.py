"""Online features: a run that encodes in each step gets the weights of one that reads a store."""

import json
import os
from collections import Counter

import numpy as np
import pytest
import tiny_pipelines
import tiny_sources
import tiny_vaes
import torch
import yaml
from commands import ONLINE, run_ranks, with_set
from safetensors.torch import load_file
from tiny_pipelines import (
    BRIA,
    COGVIEW3,
    COGVIEW4,
    FLUX,
    FLUX2,
    HI_DREAM,
    HUNYUAN_DIT,
    HUNYUAN_IMAGE,
    KANDINSKY5,
    KREA2,
    LONGCAT_IMAGE,
    LUMINA_NEXT,
    OVIS_IMAGE,
    PRX,
    SD3,
    WAN,
)

from bigdit import checkpoint
from bigdit.catalog.resolve import model_spec
from bigdit.config.data import DataConfig
from bigdit.config.stages import load_run, load_stages
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.loader.online import RawStore, open_online
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.sources.open import open_source
from bigdit.store import FeatureStore
from bigdit.store.schema import StoreSchema
from bigdit.train.loop import train
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.prepare import prepare_stages
from bigdit.train.processes.stop import Stop
from bigdit.train.resume import with_steps
from bigdit.train.step import encode

# By pipeline: the transformer, its arguments, and the VAE.
CASES = {
    "StableDiffusion3Pipeline": ("SD3Transformer2DModel", SD3, "AutoencoderKL"),
    "BriaPipeline": ("BriaTransformer2DModel", BRIA, "AutoencoderKL"),
    "CogView3PlusPipeline": ("CogView3PlusTransformer2DModel", COGVIEW3, "AutoencoderKL"),
    "OvisImagePipeline": ("OvisImageTransformer2DModel", OVIS_IMAGE, "AutoencoderKL"),
    "LongCatImagePipeline": ("LongCatImageTransformer2DModel", LONGCAT_IMAGE, "AutoencoderKL"),
    "LuminaPipeline": ("LuminaNextDiT2DModel", LUMINA_NEXT, "AutoencoderKL"),
    "PRXPipeline": ("PRXTransformer2DModel", PRX, "AutoencoderKL"),
    "Krea2Pipeline": ("Krea2Transformer2DModel", KREA2, "AutoencoderKL"),
    "Flux2Pipeline": ("Flux2Transformer2DModel", FLUX2, "AutoencoderKLFlux2"),
    "CogView4Pipeline": ("CogView4Transformer2DModel", COGVIEW4, "AutoencoderKL"),
    "FluxPipeline": ("FluxTransformer2DModel", FLUX, "AutoencoderKL"),
    "HunyuanDiTPipeline": ("HunyuanDiT2DModel", HUNYUAN_DIT, "AutoencoderKL"),
    "HunyuanImagePipeline": ("HunyuanImageTransformer2DModel", HUNYUAN_IMAGE, "AutoencoderKLHunyuanImage"),
    "HiDreamImagePipeline": ("HiDreamImageTransformer2DModel", HI_DREAM, "AutoencoderKL"),
}
VIDEOS = {
    "Kandinsky5T2VPipeline": ("Kandinsky5Transformer3DModel", KANDINSKY5, "AutoencoderKLHunyuanVideo"),
    "WanPipeline": ("WanTransformer3DModel", WAN, "AutoencoderKLWan"),
}
DROPPED = 0.4
ONLINE_AND_NOT = {"cached": (), "online": ONLINE}


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """Eleven images of several sizes. One has two captions, and some share one."""
    folder = tmp_path_factory.mktemp("captioned")
    for number in range(10):
        caption = tiny_pipelines.CAPTIONS[number % 3 * 3] + (' that reads "CAT"' if number % 2 else "")
        tiny_sources.save(folder / f"{number}.png", caption, tiny_sources.gradient(16 + number, 20 - number))
    tiny_sources.gradient(20, 20).save(folder / "several.png")
    captions = {"captions": ["a cat", "Two dogs, a red house and a blue car"], "weights": [1, 3]}
    (folder / "several.json").write_text(json.dumps(captions))
    return folder


def written(folder, name, images):
    """The config of a run over the images, in `folder`, beside its encoders."""
    class_name, kwargs, vae = (CASES | VIDEOS)[name]
    torch.manual_seed(0)
    (tiny_vaes.VIDEO_VAES if name in VIDEOS else tiny_vaes.VAES)[vae][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    tiny_pipelines.save(folder / "pipeline", name)
    config = {
        "model": {"class_name": class_name, "kwargs": kwargs},
        "data": {
            "images": str(images),
            "features": str(folder / "features"),
            "buckets": [[16, 16]],
            "part_size": 4,
            "caption_dropout": DROPPED,
        },
        "encoders": {
            "image": {"name": "vae", "class_name": vae, "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline")},
            "batch_size": 1,
        },
        "strategy": {"micro_batch_size": 4, "grad_accum_steps": 2, "optimizer": {"lr": 1.0e-2}},
        "train": {"steps": 3, "export_every": 3},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def trained(path, output, *overrides):
    """The weights of a run after its command's steps."""
    stages = load_stages(path, [f"output={output}", *overrides])
    prepared, _ = with_steps(prepare_stages(stages, starting=True))
    train(prepared, World(), Stop(60.0, World()))
    found, _ = checkpoint.latest(output)
    return load_file(next((output / "exports" / found.folder.name).glob("*/*.safetensors")))


@pytest.fixture(scope="module")
def sd3(tmp_path_factory, captioned):
    """The config of a Stable Diffusion 3 run whose features are extracted, and its final weights."""
    folder = tmp_path_factory.mktemp("sd3")
    path = written(folder, "StableDiffusion3Pipeline", captioned)
    run = load_run(path)
    extract(run, model_spec(run.model))
    return path, trained(path, folder / "cached")


def test_weights_are_to_the_bit_those_of_a_cached_run(sd3, tmp_path):
    """With three text encoders, and the same dropped and chosen captions. A resumed run, too."""
    path, cached = sd3
    online = trained(path, tmp_path / "online", *ONLINE)
    whole = trained(path, tmp_path / "whole", *ONLINE, "data.caption_dropout=0")
    assert not all(torch.equal(whole[name], each) for name, each in cached.items())
    assert online.keys() == cached.keys()
    assert all(torch.equal(online[name], each) for name, each in cached.items())
    trained(path, tmp_path / "resumed", *ONLINE, "train.steps=2", "train.export_every=2")
    resumed = trained(path, tmp_path / "resumed", *ONLINE)
    assert all(torch.equal(resumed[name], each) for name, each in cached.items())
    assert not torch.nn.modules.module._global_forward_pre_hooks  # nothing watches after its one step


@pytest.mark.slow
def test_two_processes_encode_a_share_each(sd3, tmp_path):
    """Under FSDP2, for the same global batches: the losses equal those of one process that reads a store."""
    path, _ = sd3
    chosen = [
        *ONLINE,
        "strategy.engine=fsdp2",
        "strategy.grad_accum_steps=1",
        f"output={tmp_path / 'run'}",
    ]
    done = run_ranks(2, "-m", "bigdit.train", "--config", path, *with_set(chosen))
    assert done.returncode == 0, done.stderr
    found, single = (
        [row["loss"] for row in read_metrics(output / "metrics.jsonl")]
        for output in (tmp_path / "run", path.parent / "cached")
    )
    assert len(set(single)) == 3
    assert found == pytest.approx(single, rel=2e-2)


def test_captions_are_dealt_without_reading_images(tmp_path):
    """The global batch and its seeds stay as they are, and the slowest process has little more than the others."""
    for number in range(24):
        tiny_sources.save(tmp_path / f"{number}.png", "word " * (1 + number * number % 17))
    source = open_source(DataConfig(images=str(tmp_path), features=None, buckets=[(8, 8)]))
    schema = StoreSchema(codec={}, text_encoder={}, buckets=[(8, 8)], sources=source.identity["sources"], part_size=8)
    raw = RawStore(source, schema, (4, 4, 4), "rgb", torch.float32, (90, 8))
    order = Order(raw.counts, list(raw.buckets), 24, 0)
    options = {"micro_batch_size": 2, "grad_accum_steps": 3, "seed": 0, "caption_dropout": 0.1}
    plain, dealt = (
        [FeatureStream(raw, World(rank=rank, world_size=4), order, by_text=by_text, **options) for rank in range(4)]
        for by_text in (False, True)
    )

    def read(streams):
        """Each sample that a process of `streams` reads, and the bytes of captions [processes, passes]."""
        batches = [stream.micro_batches(1) for stream in streams]
        samples = Counter(
            sample
            for own in batches
            for each in own
            for sample in zip(each.seeds, each.indices, each.captions, strict=True)
        )
        return samples, np.array([[sum(len(text or "") for text in each.captions) for each in own] for own in batches])

    (samples, before), (same, after) = read(plain), read(dealt)
    assert samples == same
    assert len(samples) == 24
    more = [each.max(0).sum() / each.mean(0).sum() - 1 for each in (after, before)]
    assert more[0] < 0.05 < more[1], more
    again = [[seeds for *_, seeds in stream.samples(1)] for stream in dealt]
    for image in tmp_path.glob("*.png"):
        image.write_bytes(b"")
    assert [[seeds for *_, seeds in stream.samples(1)] for stream in dealt] == again


def test_a_run_by_epochs_counts_its_images(sd3, tmp_path, capsys):
    path, cached = sd3
    lines = [*ONLINE, "train.steps=null", "train.epochs=2"]
    assert all(torch.equal(each, cached[name]) for name, each in trained(path, tmp_path / "run", *lines).items())
    record = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert record["strategy"]["features"] == "online"
    assert record["steps"] == 3


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    """Seven videos of nine frames."""
    folder = tmp_path_factory.mktemp("filmed")
    for video in range(7):
        for frame in range(9):
            image = tiny_sources.gradient(16 + frame, 20 - video)
            tiny_sources.save(folder / f"{video}" / f"{frame}.png", None, image)
        (folder / f"{video}.txt").write_text(tiny_pipelines.CAPTIONS[2 * video % 5 // 2 * 2])
    return folder


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"StableDiffusion3Pipeline"}))
def test_every_stream_of_a_batch_is_that_of_a_store(name, tmp_path, captioned):
    """Latents, states, masks and pooled vectors of all samples, with some captions dropped."""
    assert_same(written(tmp_path, name, captioned))


@pytest.fixture
def one_thread(monkeypatch):
    """As in extraction's workers: with several threads, convolutions over frames round differently. A run uses all
    its cores."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", VIDEOS)
def test_videos_are_encoded_as_for_a_store(name, tmp_path, filmed):
    """Training on them is equal, too, to the bit."""
    path = written(tmp_path, name, filmed)
    clips = (f"data.images={{path: {filmed}, frame_rate: 8}}", "data.fps=8", "data.buckets=[[9, 16, 16]]")
    assert_same(path, *clips)
    cached, online = (trained(path, tmp_path / each, *clips, *more) for each, more in ONLINE_AND_NOT.items())
    assert cached.keys() == online.keys()
    assert all(torch.equal(online[key], each) for key, each in cached.items())


def assert_same(path, *overrides):
    """Each encoded batch equals the store's."""
    run = load_run(path, overrides)
    spec = model_spec(run.model)
    extract(run, spec)
    store = FeatureStore.open(run.data.features)
    raw, encoders = open_online(run, spec, None, torch.device("cpu"), 1)
    assert (raw.index.counts == store.index.counts).all()
    order = Order(store.index.counts, store.index.shapes, 4, 0)
    options = {"micro_batch_size": 4, "grad_accum_steps": 1, "seed": 0, "caption_dropout": DROPPED}
    cached, online = (FeatureStream(each, World(), order, **options) for each in (store, raw))
    dropped = 0
    for step in range(6):
        (expected,), (captions,) = cached.micro_batches(step), online.micro_batches(step)
        dropped += captions.captions.count(None)
        found = encode(encoders, 3, captions, torch.bfloat16)
        expected = expected.to(torch.device("cpu"), torch.bfloat16)
        assert found.seeds == expected.seeds
        assert found.extras.keys() == expected.extras.keys()
        for own, other in (
            (found.latents, expected.latents),
            (found.text_embeds, expected.text_embeds),
            (found.text_mask, expected.text_mask),
            *((found.extras[key], each) for key, each in expected.extras.items()),
        ):
            assert own.dtype == other.dtype
            assert torch.equal(own, other)
    assert 4 < dropped < 16


def test_what_is_not_taken_online_is_refused(sd3, tmp_path, captioned):
    path, _ = sd3
    printed = {
        "data.buckets=[[16, 16], [16, 24]]": "data.buckets has 2: the bucket of an image is known only after all were "
        "read",
        "validation.samples=2": "validation needs samples of a cache",
        "encoders.device=cpu": "encoders.device is cpu: encoders must be on the model's device; set it to auto",
        "encoders.image.latents=moments": "encoders.image.latents is moments, which needs a cache",
        "encoders.text.stored=fp8": "encoders.text.stored is fp8, which needs a cache; leave it out",
        "encoders.first_frame={}": "encoders.first_frame needs a cache",
        "stages=[{train: {steps: 1}}, {train: {steps: 2}}]": "it is of a run without stages",
    }
    for override, problem in printed.items():
        with pytest.raises(UserError) as error:
            prepare_stages(load_stages(path, [*ONLINE, override]))
        assert any(problem in line for line in error.value.problems), (override, error.value.problems)
    run = load_run(path, [*ONLINE])
    with pytest.raises(UserError, match=r"strategy\.features is online: each step encodes, and nothing is extracted"):
        extract(run, model_spec(run.model))
    (tmp_path / "some.tar").touch()
    with pytest.raises(
        UserError, match=r"holds tars\. Their index needs data\.features, and strategy\.features is onli"
    ):
        trained(path, tmp_path / "run", *ONLINE, f"data.images={tmp_path}/some.tar")
    with pytest.raises(
        UserError, match=r"encoders\.text gives 12 pooled features, and the model's pooled_projection_di"
    ):
        trained(path, tmp_path / "run", *ONLINE, "model.kwargs.pooled_projection_dim=10")
