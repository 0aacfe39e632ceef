"""Models of several texts from pictures to samples: a pipeline's encoders, a store with streams, training, export."""

import json
import math

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
import yaml
from commands import bigdit
from stores import stream_of

from bigdit import checkpoint
from bigdit.extract.verify import verify
from bigdit.store import FeatureStore
from bigdit.store.header import read_header
from bigdit.store.part import part_path

HUNYUAN_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 16,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 8,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 6,
    "use_style_cond_and_image_meta_size": False,
}


def hunyuan_dit(pipeline, captions):
    """What the transformer is fed of captions, by the batch's names: two calls of encode_prompt."""
    own, clip = (pipeline.encode_prompt(captions, device="cpu", text_encoder_index=which) for which in (1, 0))
    return {"text_embeds": own[0], "text_mask": own[2], "clip_text": clip[0], "clip_text_mask": clip[2]}


# By pipeline: the transformer, its arguments, the VAE, and what the transformer is fed of captions.
FAMILIES = {
    "HunyuanDiTPipeline": ("HunyuanDiT2DModel", HUNYUAN_DIT, "AutoencoderKL", hunyuan_dit),
}

WANTED = {"HunyuanDiT2DModel": "encoders.text gives no clip_text beside it, which HunyuanDiT2DModel is fed"}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several texts")]


@pytest.fixture(scope="module", params=FAMILIES)
def encoded(request, tmp_path_factory, pictures):
    """A pipeline, what its transformer is fed, and the folder of a run over sixteen pictures that are encoded."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    class_name, kwargs, vae, fed = FAMILIES[name]
    torch.manual_seed(0)
    tiny_vaes.VAES[vae][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", name)
    (folder / "pictures").mkdir()
    for file in sorted(pictures.iterdir())[:32]:  # sixteen digits and their captions
        (folder / "pictures" / file.name).write_bytes(file.read_bytes())
    config = {
        "model": {"class_name": class_name, "kwargs": kwargs},
        "data": {"images": str(folder / "pictures"), "features": str(folder / "features"), "buckets": [[16, 16]]},
        "encoders": {
            "image": {"name": "vae", "class_name": vae, "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline")},
        },
        "train": {"steps": 3, "micro_batch_size": 4, "precision": "fp32", "ema": {"decay": 0.9}},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = bigdit("extract", "--config", folder / "run.yaml", "--workers", "1")
    assert done.returncode == 0, done.stderr
    return tiny_pipelines.pipeline_of(name, parts), fed, folder


def test_batches_are_to_the_bit_what_the_pipeline_feeds_its_transformer(encoded):
    """But for states of further texts that their masks hide, which are not stored."""
    pipeline, fed, folder = encoded
    store = FeatureStore.open(folder / "features")
    stream = stream_of(store)
    captions = [file.read_text().strip() for file in sorted((folder / "pictures").glob("*.txt"))]
    seen = set()
    for step in range(4):
        (batch,), ((bucket, parts, rows, _),) = stream.micro_batches(step), stream.samples(step)
        given = {"text_embeds": batch.text_embeds, "text_mask": batch.text_mask, **batch.extras}
        for place, (part, row) in enumerate(zip(parts.tolist(), rows.tolist(), strict=True)):
            index = int(store.part(part).rows[bucket][row, 0])
            seen.add(index)
            with torch.no_grad():
                expected = fed(pipeline, [captions[index]])
            assert given.keys() == expected.keys()
            for name, (whole,) in expected.items():
                mask = expected.get(f"{name}_mask")
                cut = whole if mask is None else whole * mask[0][:, None]
                assert torch.equal(given[name][place], cut.bfloat16()), name
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


def test_a_step_is_rehearsed_to_the_byte_and_what_is_trained_is_sampled_and_exported(encoded):
    _, _, folder = encoded
    done = bigdit("bench", "step", "--config", folder / "run.yaml", "--steps", "3", "--out", folder / "step.json")
    assert done.returncode == 0, done.stderr
    receipt = json.loads((folder / "step.json").read_text())
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    done = bigdit("train", "--config", folder / "run.yaml")
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    done = bigdit("sample", "--checkpoint", folder / "run", "--caption", "a handwritten six", "--size", "16x16",
                  "--steps", "2", "--negative", "a dog", "--out", folder / "samples", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["pictures"]) == 1
    found, _ = checkpoint.latest(folder / "run")
    checkpoint.export(found, folder / "exported")
    config = yaml.safe_load((folder / "run.yaml").read_text())
    model = getattr(diffusers, config["model"]["class_name"]).from_pretrained(folder / "exported/transformer")
    assert {key: model.config[key] for key in config["model"]["kwargs"]} == config["model"]["kwargs"]


def test_a_store_that_lacks_what_the_model_is_fed_is_refused(encoded, tmp_path):
    """Of one encoder, or of a text of another width: before anything is encoded, and before a step."""
    _, _, folder = encoded
    t5 = {"config": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}}
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["encoders"]["text"], config["data"]["features"] = t5, str(tmp_path / "features")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = bigdit("extract", "--config", tmp_path / "run.yaml")
    assert done.returncode == 1
    assert WANTED[config["model"]["class_name"]] in " ".join(done.stderr.split())
