"""Sampling with pipelines' encoders: the transformer gets what the pipeline would give it."""

import diffusers
import pytest
import tiny_pipelines
import tiny_vaes
import torch
from tiny_pipelines import (
    BRIA,
    COGVIEW3,
    COGVIEW4,
    FLUX2,
    HI_DREAM,
    HUNYUAN_DIT,
    HUNYUAN_IMAGE,
    HUNYUAN_VIDEO_15,
    KANDINSKY5,
    KREA2,
    LONGCAT_IMAGE,
    LUMINA_NEXT,
    MOCHI,
    OVIS_IMAGE,
    PRX,
    SD3,
    WAN,
)

from bigdit import checkpoint, engines, models, objectives
from bigdit.loader.batch import Batch
from bigdit.sampling import Sampler, SamplingOptions
from bigdit.strategy import ModelSpec, Strategy


def guided(pipeline, away, **asked):
    """encode_prompt's results for a caption, and for the negative prompt."""
    negative = None if away is None else [away]
    more = {"negative_prompt": negative, "do_classifier_free_guidance": True, "device": "cpu"}
    return pipeline.encode_prompt(prompt=[CAPTION], **more, **asked)


def of_sd3(pipeline, away):
    *states, pooled, null = guided(pipeline, away, prompt_2=None, prompt_3=None)
    return [(own, None, {"pooled_text": vector}) for own, vector in zip(states, (pooled, null), strict=True)]


def of_wan(pipeline, away):
    return [(own, None, {}) for own in guided(pipeline, away, max_sequence_length=512)]


def of_states(pipeline, away):
    own, null, *_ = guided(pipeline, away)
    return [(own, None, {}), (null, None, {})]


def of_longcat(pipeline, away):
    return [(pipeline.encode_prompt(prompt=[text])[0], None, {}) for text in (CAPTION, away or "")]


def of_mochi(pipeline, away):
    own, mask, null, null_mask = guided(pipeline, away)
    return [(own, mask, {}), (null, null_mask, {})]


def of_lumina_next(pipeline, away):
    own, mask, null, null_mask = guided(pipeline, away, clean_caption=True)
    return [(own, mask, {}), (null, null_mask, {})]


def of_prx(pipeline, away):
    own, mask, null, null_mask = pipeline.encode_prompt([CAPTION], torch.device("cpu"), negative_prompt=away or "")
    return [(own, mask, {}), (null, null_mask, {})]


def of_kandinsky(pipeline, away):
    given = [pipeline.encode_prompt([text], device="cpu") for text in (CAPTION, away or "")]
    return [(states, None, {"pooled_text": vector}) for states, vector, _ in given]


def of_krea2(pipeline, away):
    given = [pipeline.encode_prompt(prompt=[text], device="cpu") for text in (CAPTION, away or "")]
    return [(layers.flatten(2), mask, {}) for layers, mask in given]


def of_hunyuan_dit(pipeline, away):
    own, clip = (guided(pipeline, away, text_encoder_index=which) for which in (1, 0))
    return [(own[i], own[2 + i], {"clip_text": clip[i], "clip_text_mask": clip[2 + i].float()}) for i in (0, 1)]


def of_hi_dream(pipeline, away):
    own, null, llama, null_llama, pooled, null_pooled = guided(pipeline, away)
    given = (own, llama, pooled), (null, null_llama, null_pooled)
    return [
        (states, None, {"llama_text": layers.transpose(0, 1).flatten(1, 2), "pooled_text": vector})
        for states, layers, vector in given
    ]


def of_hunyuan_image(pipeline, away):
    given = [pipeline.encode_prompt(prompt=[text], device="cpu") for text in (CAPTION, away or "")]
    return [(own, mask, {"glyph_text": glyphs, "glyph_text_mask": shown}) for own, mask, glyphs, shown in given]


CAPTION = 'a cat on a mat that reads "CAT"'
# By name: the transformer and its arguments, the pipeline, the VAE, the latents of 16 × 24 pixels; then states, mask
# and what else encode_prompt returns, of the caption and of the negative prompt.
CASES = {
    "bria": ("BriaTransformer2DModel", BRIA, "BriaPipeline", "AutoencoderKL", (4, 8, 12), of_states),
    "cogview3": (
        *("CogView3PlusTransformer2DModel", COGVIEW3, "CogView3PlusPipeline", "AutoencoderKL", (4, 8, 12), of_states),
    ),
    "kandinsky-5": (
        *("Kandinsky5Transformer3DModel", KANDINSKY5, "Kandinsky5T2VPipeline", "AutoencoderKLHunyuanVideo"),
        *((4, 1, 8, 12), of_kandinsky),
    ),
    "krea2": ("Krea2Transformer2DModel", KREA2, "Krea2Pipeline", "AutoencoderKL", (4, 8, 12), of_krea2),
    "flux.2": ("Flux2Transformer2DModel", FLUX2, "Flux2Pipeline", "AutoencoderKLFlux2", (4, 8, 12), of_longcat),
    "cogview4": (
        *("CogView4Transformer2DModel", COGVIEW4, "CogView4Pipeline", "AutoencoderKL", (4, 8, 12), of_states),
    ),
    "longcat": (
        *("LongCatImageTransformer2DModel", LONGCAT_IMAGE, "LongCatImagePipeline", "AutoencoderKL", (4, 8, 12)),
        of_longcat,
    ),
    "ovis": (
        *("OvisImageTransformer2DModel", OVIS_IMAGE, "OvisImagePipeline", "AutoencoderKL", (4, 8, 12), of_states),
    ),
    "hidream": (
        *("HiDreamImageTransformer2DModel", HI_DREAM, "HiDreamImagePipeline", "AutoencoderKL", (4, 8, 12), of_hi_dream),
    ),
    "hunyuandit": ("HunyuanDiT2DModel", HUNYUAN_DIT, "HunyuanDiTPipeline", "AutoencoderKL", (4, 8, 12), of_hunyuan_dit),
    "hunyuanimage": (
        *("HunyuanImageTransformer2DModel", HUNYUAN_IMAGE, "HunyuanImagePipeline", "AutoencoderKLHunyuanImage"),
        *((4, 8, 12), of_hunyuan_image),
    ),
    "hunyuanvideo-1.5": (
        *("HunyuanVideo15Transformer3DModel", HUNYUAN_VIDEO_15, "HunyuanVideo15Pipeline"),
        *("AutoencoderKLHunyuanVideo15", (4, 1, 4, 6), of_hunyuan_image),
    ),
    "lumina-next": (
        *("LuminaNextDiT2DModel", LUMINA_NEXT, "LuminaPipeline", "AutoencoderKL", (4, 8, 12), of_lumina_next),
    ),
    "mochi": ("MochiTransformer3DModel", MOCHI, "MochiPipeline", "AutoencoderKLMochi", (4, 1, 8, 12), of_mochi),
    "prx": ("PRXTransformer2DModel", PRX, "PRXPipeline", "AutoencoderKL", (4, 8, 12), of_prx),
    "sd3": ("SD3Transformer2DModel", SD3, "StableDiffusion3Pipeline", "AutoencoderKL", (4, 8, 12), of_sd3),
    "wan": ("WanTransformer3DModel", WAN, "WanPipeline", "AutoencoderKLWan", (4, 1, 8, 12), of_wan),
}


def saved_beside_encoders(folder, class_name, kwargs, pipeline, vae):
    """A checkpoint of random weights and its export, beside its encoders; and the parts of its pipeline."""
    tiny_vaes.VAES[vae][0]().save_pretrained(folder / "vae")
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", pipeline)
    run = {
        "model": {"class_name": class_name, "kwargs": kwargs},
        "data": {"images": [{"path": "images"}], "features": "features", "buckets": [[16, 24]]},
        "encoders": {
            "image": {"name": "vae", "class_name": vae, "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline")},
        },
        "objective": {"name": "flow_matching"},
        "strategy": {"micro_batch_size": 1},
        "train": {"steps": 1},
        "output": "run",
    }
    spec, strategy = ModelSpec(name="tiny", class_name=class_name, kwargs=kwargs), Strategy(precision="fp32")
    family, cpu = models.family(class_name), torch.device("cpu")
    model = models.build(spec, device=cpu, dtype=torch.float32, seed=0)
    engine = engines.create(strategy, model, family, device=cpu)
    described = {"model": spec.model_dump(mode="json"), "strategy": strategy.model_dump(mode="json"), "run": run}
    with checkpoint.Saver(folder, checkpoint.Peers(), checkpoint.Keeping(1)) as saver:
        saver.save(engine, None, 1, described | {"data": None})
    found, _ = checkpoint.latest(folder)
    checkpoint.export(found, folder / "exported")
    return found, parts


@pytest.mark.parametrize("negative", [None, "a dog in the rain"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_images_follow_from_what_the_pipeline_encodes(name, negative, tmp_path):
    class_name, kwargs, pipeline_name, vae, shape, conditions = CASES[name]
    saved, parts = saved_beside_encoders(tmp_path, class_name, kwargs, pipeline_name, vae)
    sampler = Sampler(saved, torch.device("cpu"))
    options = SamplingOptions(height=16, width=24, steps=1, guidance=2.0, negative=negative, seed=3)
    image = next(sampler.sample([CAPTION], options))
    assert (image.shape, image.dtype) == ((3, 16, 24), torch.uint8)

    pipeline = tiny_pipelines.pipeline_of(pipeline_name, parts)
    noise = objectives.draw_noise(torch.empty(1, *shape), [3])
    with torch.no_grad():
        family, model = (
            models.family(class_name),
            getattr(diffusers, class_name).from_pretrained(tmp_path / "exported/transformer").eval(),
        )
        batches = [
            Batch(noise, states, torch.ones(states.shape[:2]) if mask is None else mask.float(), (), extras)
            for states, mask, extras in conditions(pipeline, negative)
        ]
        predicted = [family.predict(model, noise, torch.ones(1), batch) for batch in batches]
        velocities = [objectives.of_latents(each, 4) for each in predicted]
        caption, none = velocities
        latents = noise - (none + 2.0 * (caption - none))  # one Euler step over all of t
        expected = ((sampler._codec.decode(latents) + 1) * 127.5).round().clamp(0, 255)
    assert (image.float() - expected[0]).abs().max() <= 1  # at a rounding border
    assert expected.std() > 5
