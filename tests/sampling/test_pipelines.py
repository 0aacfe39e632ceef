"""Sampling with the encoders of pipelines: what the transformer is fed is what the pipeline's own would be."""

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
from tiny_pipelines import SD3

from bigdit import checkpoint, engines, models, objectives
from bigdit.dist import World
from bigdit.loader.batch import Batch
from bigdit.sampling import Sampler, SamplingOptions
from bigdit.spec import ModelSpec, Strategy

WAN = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
# By name: the transformer and its arguments, the pipeline, the VAE, the latents of 16 × 24 pixels.
CASES = {
    "sd3": ("SD3Transformer2DModel", SD3, "StableDiffusion3Pipeline", "AutoencoderKL", (4, 8, 12)),
    "wan": ("WanTransformer3DModel", WAN, "WanPipeline", "AutoencoderKLWan", (4, 1, 8, 12)),
}


def saved_beside_encoders(folder, class_name, kwargs, pipeline, vae):
    """A checkpoint of random weights, exported too, beside its encoders; and the parts of its pipeline."""
    tiny_vaes.VAES[vae][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", pipeline)
    run = {
        "model": {"class_name": class_name, "kwargs": kwargs},
        "data": {"images": "pictures", "features": "features", "buckets": [[16, 24]]},
        "encoders": {
            "image": {"name": "vae", "class_name": vae, "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline")},
        },
        "train": {"steps": 1, "micro_batch_size": 1},
        "output": "run",
    }
    spec, strategy = ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs), Strategy(precision="fp32")
    family, cpu = models.family(class_name), torch.device("cpu")
    model = models.build(spec, device=cpu, dtype=torch.float32, seed=0)
    engine = engines.create(strategy, model, family, device=cpu, world=World())
    described = {"model": spec.model_dump(mode="json"), "strategy": strategy.model_dump(mode="json"), "run": run}
    with checkpoint.Saver(folder, checkpoint.Peers(), checkpoint.Keeping(1)) as saver:
        saver.save(engine, None, 1, described | {"data": None})
    found, _ = checkpoint.latest(folder)
    checkpoint.export(found, folder / "exported")
    return found, parts


@pytest.mark.parametrize("negative", [None, "a dog in the rain"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_pictures_follow_from_what_the_pipeline_encodes(name, negative, tmp_path):
    class_name, kwargs, pipeline_name, vae, shape = CASES[name]
    saved, parts = saved_beside_encoders(tmp_path, class_name, kwargs, pipeline_name, vae)
    sampler = Sampler(saved, torch.device("cpu"))
    options = SamplingOptions(height=16, width=24, steps=1, guidance=2.0, negative=negative, seed=3)
    picture = next(sampler.sample(["a cat on a mat"], options))
    assert (picture.shape, picture.dtype) == ((3, 16, 24), torch.uint8)

    pipeline = tiny_pipelines.pipeline_of(pipeline_name, parts)
    more = {"prompt_2": None, "prompt_3": None} if name == "sd3" else {"max_sequence_length": 512}
    noise = objectives.draw_noise(torch.empty(1, *shape), [3])
    with torch.no_grad():
        given = pipeline.encode_prompt(
            prompt=["a cat on a mat"],
            negative_prompt=None if negative is None else [negative],
            device="cpu",
            do_classifier_free_guidance=True,
            **more,
        )
        family, model = (
            models.family(class_name),
            getattr(diffusers, class_name).from_pretrained(tmp_path / "exported/transformer"),
        )
        velocities = []
        for place in (0, 1):  # of the caption, of what guidance leads away from
            extras = {"pooled_text": given[2 + place]} if name == "sd3" else {}
            states = given[place]
            batch = Batch(noise, states, torch.ones(states.shape[:2]), seeds=(), extras=extras)
            velocities.append(family.predict(model, noise, torch.ones(1), batch))
        caption, none = velocities
        latents = noise - (none + 2.0 * (caption - none))  # one Euler step over all of t
        expected = ((sampler._codec.decode(latents) + 1) * 127.5).round().clamp(0, 255)
    assert (picture.float() - expected[0]).abs().max() <= 1  # at a rounding border
    assert expected.std() > 5
