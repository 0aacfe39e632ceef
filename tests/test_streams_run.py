"""Models with several texts from images to samples: a pipeline's encoders, a store with streams, training, export."""

import json
import math

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
import yaml
from commands import in_process
from gpus import benched
from stores import stream_of
from tiny_pipelines import HI_DREAM, HUNYUAN_DIT, HUNYUAN_IMAGE, HUNYUAN_VIDEO_15
from training import train_here

from bigdit import checkpoint, models
from bigdit.extract.verify import verify
from bigdit.profile.steps import batch as profiled_batch
from bigdit.store import FeatureStore
from bigdit.store.header import read_header
from bigdit.store.part import part_path
from bigdit.strategy import ModelSpec, Strategy
from bigdit.train.data import largest_batch_shape


def hunyuan_dit(pipeline, captions):
    """What the transformer gets of captions, by the batch's names: two calls of encode_prompt."""
    own, clip = (pipeline.encode_prompt(captions, device="cpu", text_encoder_index=which) for which in (1, 0))
    return {"text_embeds": own[0], "text_mask": own[2], "clip_text": clip[0], "clip_text_mask": clip[2]}


def hi_dream(pipeline, captions):
    """T5's states, Llama's layers one after another, and two CLIPs' vectors, without masks."""
    own, _, llama, _, pooled, _ = pipeline.encode_prompt(captions, device="cpu")
    llama = llama.transpose(0, 1).flatten(1, 2)
    masks = {"text_mask": torch.ones(own.shape[:2]), "llama_text_mask": torch.ones(llama.shape[:2])}
    return {"text_embeds": own, "llama_text": llama, "pooled_text": pooled, **masks}


def hunyuan_image(pipeline, captions):
    """Qwen's states without padding, which is not stored either, and ByT5's states of quoted text."""
    own, mask, glyphs, shown = pipeline.encode_prompt(captions, device="cpu", batch_size=len(captions))
    own = own * mask[..., None]
    return {"text_embeds": own, "text_mask": mask, "glyph_text": glyphs, "glyph_text_mask": shown}


# By pipeline: the transformer, its arguments, the VAE, and what the transformer gets of captions.
FAMILIES = {
    "HiDreamImagePipeline": ("HiDreamImageTransformer2DModel", HI_DREAM, "AutoencoderKL", hi_dream),
    "HunyuanDiTPipeline": ("HunyuanDiT2DModel", HUNYUAN_DIT, "AutoencoderKL", hunyuan_dit),
    "HunyuanImagePipeline": (
        *("HunyuanImageTransformer2DModel", HUNYUAN_IMAGE, "AutoencoderKLHunyuanImage", hunyuan_image),
    ),
    "HunyuanVideo15Pipeline": (
        *("HunyuanVideo15Transformer3DModel", HUNYUAN_VIDEO_15, "AutoencoderKLHunyuanVideo15", hunyuan_image),
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def encoded(request, tmp_path_factory, images):
    """A pipeline, what its transformer gets, and the folder of a run over sixteen encoded images."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    class_name, kwargs, vae, fed = FAMILIES[name]
    torch.manual_seed(0)
    tiny_vaes.VAES[vae][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", name)
    (folder / "images").mkdir()
    for file in sorted(images.iterdir())[:32]:  # sixteen digits and their captions
        (folder / "images" / file.name).write_bytes(file.read_bytes())
    for file in sorted((folder / "images").glob("*.txt"))[::3]:
        file.write_text(f'{file.read_text().strip()} that reads "{file.stem}"')
    config = {
        "model": {"class_name": class_name, "kwargs": kwargs},
        "data": {"images": str(folder / "images"), "features": str(folder / "features"), "buckets": [[16, 16]]},
        "encoders": {
            "image": {"name": "vae", "class_name": vae, "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline")},
        },
        "strategy": {"micro_batch_size": 4, "precision": "fp32", "ema": {"decay": 0.9}},
        "train": {"steps": 3},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = in_process("extract", "--config", folder / "run.yaml", "--workers", "1")
    assert done.returncode == 0, done.stderr
    return tiny_pipelines.pipeline_of(name, parts), fed, folder


def fed_by(folder):
    """What a profile uses of a run: shapes of a batch, strategy, and extra inputs of the family."""
    config = yaml.safe_load((folder / "run.yaml").read_text())["model"]
    spec = ModelSpec(name="tiny", **config)
    shape = largest_batch_shape(FeatureStore.open(folder / "features"))
    return shape, Strategy(micro_batch_size=4), models.family(spec.class_name).extras(models.outline(spec))


def sizes(batch):
    """Shapes and dtypes of a batch's tensors."""
    own = {"latents": batch.latents, "text_embeds": batch.text_embeds, "text_mask": batch.text_mask}
    return {name: (each.shape, each.dtype) for name, each in {**own, **batch.extras}.items()}


def test_batches_are_to_the_bit_what_the_pipeline_feeds_its_transformer(encoded):
    """Except for states of further texts that their masks hide: these are not stored."""
    pipeline, fed, folder = encoded
    store = FeatureStore.open(folder / "features")
    stream = stream_of(store)
    profiled = profiled_batch(*fed_by(folder))
    captions = [file.read_text().strip() for file in sorted((folder / "images").glob("*.txt"))]
    batch = sorted(set(captions), key=lambda caption: (-len(caption), caption))  # all at once, as they were encoded
    with torch.no_grad():
        whole = fed(pipeline, batch)
    seen = set()
    for step in range(4):
        (micro_batch,), ((bucket, parts, rows, _),) = stream.micro_batches(step), stream.samples(step)
        given = {"text_embeds": micro_batch.text_embeds, "text_mask": micro_batch.text_mask, **micro_batch.extras}
        for place, (part, row) in enumerate(zip(parts.tolist(), rows.tolist(), strict=True)):
            index = int(store.part(part).rows[bucket][row, 0])
            seen.add(index)
            expected = {name: each[batch.index(captions[index])] for name, each in whole.items()}
            assert given.keys() == expected.keys()
            for name, each in expected.items():
                mask = expected.get(f"{name}_mask")
                each = each if mask is None else each * mask[:, None]
                assert torch.equal(given[name][place], each.bfloat16()), name
        assert sizes(micro_batch) == sizes(profiled)
    assert seen == set(range(16))


def test_every_byte_of_a_stream_is_verified(encoded, tmp_path):
    _, _, folder = encoded
    (tmp_path / "features").mkdir()
    for file in (folder / "features").iterdir():
        if file.is_file():
            (tmp_path / "features" / file.name).write_bytes(file.read_bytes())
    path = part_path(tmp_path / "features", 0, 16)
    columns, data = read_header(path).columns, path.read_bytes()
    damaged = 0
    for name, column in columns.items():
        if "/" in name and name.split("/")[0] in ("stream", "text"):
            changed = bytearray(data)
            changed[column.offset + column.nbytes // 2] ^= 16
            path.write_bytes(changed)
            (found,) = verify(tmp_path / "features").damaged
            assert found.file == path.name
            damaged += 1
    assert damaged == 2 * len(FeatureStore.open(folder / "features").schema.streams)
    path.write_bytes(data)
    assert verify(tmp_path / "features").damaged == []


def test_a_step_takes_what_was_predicted_and_what_is_trained_is_sampled_and_exported(encoded):
    _, _, folder = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    train_here(folder / "run.yaml")
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    done = in_process("sample", "--checkpoint", folder / "run", "--caption", "a handwritten six", "--size", "16x16",
                      "--steps", "2", "--negative", "a dog", "--out", folder / "samples", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["images"]) == 1
    found, _ = checkpoint.latest(folder / "run")
    checkpoint.export(found, folder / "exported")
    config = yaml.safe_load((folder / "run.yaml").read_text())
    model = getattr(diffusers, config["model"]["class_name"]).from_pretrained(folder / "exported/transformer")
    assert {key: model.config[key] for key in config["model"]["kwargs"]} == config["model"]["kwargs"]


def test_a_store_that_lacks_what_the_model_is_fed_is_refused(encoded, tmp_path):
    """A missing encoder, or a text of another width, is refused before anything is encoded, and before a step."""
    _, _, folder = encoded
    t5 = {"config": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}}
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["encoders"]["text"], config["data"]["features"] = t5, str(tmp_path / "features")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = in_process("extract", "--config", tmp_path / "run.yaml")
    assert done.returncode == 1
    name, class_name = next(iter(FeatureStore.open(folder / "features").schema.streams)), config["model"]["class_name"]
    assert f"encoders.text gives no {name}, which {class_name} needs" in " ".join(done.stderr.split())
