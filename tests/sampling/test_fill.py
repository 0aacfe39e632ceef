"""Fill models from files to samples: they get of a masked image what their pipeline makes of it."""

import json

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import tiny_sources
import tiny_vaes
import torch
from commands import in_process, with_set
from gpus import benched
from PIL import Image
from training import encoded_for, refusal, train_here

from bigdit.loader.stream import BatchReader
from bigdit.store import FeatureStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fill")]

PIPELINE = "FluxFillPipeline"
SIDE, SHAPE = 16, (4, 8, 8)


def colours(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The folder of a run over two images with masks and two without, and its pipeline without a transformer."""
    folder = tmp_path_factory.mktemp("fill")
    torch.manual_seed(0)
    vae = tiny_vaes.kl(shift_factor=0.1, scaling_factor=0.4).eval()
    parts = tiny_pipelines.save(folder / "pipeline", PIPELINE)
    for number in range(4):
        tiny_sources.save(folder / f"images/{number}.png", f"a square {number}", colours(number))
    for number in range(2):
        gray = np.random.default_rng(20 + number).integers(0, 256, (SIDE, SIDE), np.uint8)
        Image.fromarray(gray).save(folder / f"images/{number}.mask.png")
    flux = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX_FILL}
    data = {"images": {"path": str(folder / "images"), "mask": "file"}, "buckets": [[SIDE, SIDE]], "fill": True}
    encoded_for(folder, flux, vae, data, {"max_tokens": 16})
    parts |= {"vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return folder, tiny_pipelines.pipeline_of(PIPELINE, parts)


def fed_by(pipeline, image, mask):
    """The tokens of a masked image and its mask, as the pipeline makes them of the mode of the VAE's distribution."""
    pixels = pipeline.image_processor.preprocess(image, SIDE, SIDE)
    mask = pipeline.mask_processor.preprocess(mask, SIDE, SIDE)
    with torch.no_grad():
        mode = pipeline.vae.encode(pixels * (1 - mask)).latent_dist.mode()
        given = (1, SHAPE[0], 1, SIDE, SIDE, torch.float32, "cpu", None)
        mask, latents = pipeline.prepare_mask_latents(mask, mode, *given)
    return torch.cat([latents, mask], dim=2)


def test_batches_have_what_the_pipeline_makes_of_an_image_and_its_mask(encoded):
    folder, pipeline = encoded
    store = FeatureStore.open(folder / "features")
    reader = BatchReader(store, 4, 1.0, pinned=False)
    batch = reader.read(SHAPE, *torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3]]).numpy(), [1, 2, 3, 4])
    assert set(batch.extras) == {"pooled_text", "fill"}  # no mask for the loss
    drawn = []
    for number, found in enumerate(batch.extras["fill"]):
        mask = torch.pixel_shuffle(found[SHAPE[0] :].float(), 2)[0]
        drawn.append(Image.fromarray((mask * 255).numpy().astype(np.uint8)))
        asked = drawn[number] if number > 1 else Image.open(folder / f"images/{number}.mask.png")
        tokens = fed_by(pipeline, colours(number), asked)
        packed = pipeline._pack_latents(found[None], 1, 8, 8, 8)
        assert torch.equal(packed[..., 16:], tokens[..., 16:].bfloat16())
        torch.testing.assert_close(packed, tokens.bfloat16())  # a batch rounds differently
    assert all(0 < np.asarray(each).mean() < 255 for each in drawn)
    assert drawn[2] != drawn[3]  # each has its own


def test_a_step_takes_what_was_predicted_and_the_pipeline_paints_with_what_was_trained(encoded):
    folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    image = folder / "images/0.png"
    train_here(folder / "run.yaml", "samples.captions=[a cat]", f"samples.images=[{image}]", "samples.steps=2",
               "samples.every=2", "samples.seed=5")  # fmt: skip
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "a cat", "--image", image, "--steps", "2",
                       "--seed", "5", "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert (folder / "samples/grid.png").read_bytes() == (folder / "run/samples/step-00000002.png").read_bytes()
    unmasked = folder / "images/3.png"
    done = in_process("sample", "--checkpoint", folder / "run", "--caption", "a cat", "--image", unmasked,
                      "--out", folder / "none")  # fmt: skip
    assert done.returncode == 1
    assert "the image has no mask; put x.mask.png beside x.png" in " ".join(done.stderr.split())
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(folder / "exported/transformer")
    whole = tiny_pipelines.pipeline_of(PIPELINE, pipeline.components | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    asked = {
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": 2,
        "output_type": "latent",
        "max_sequence_length": 16,
    }
    made = []
    for number in (0, 1):
        mask = Image.open(folder / f"images/{number}.mask.png")
        seeded = {"generator": torch.Generator().manual_seed(0)}
        made.append(whole("a cat", image=colours(0), mask_image=mask, **asked, **seeded).images)
    assert not torch.equal(*made)


def test_what_does_not_fit_is_refused_in_a_line(encoded, tmp_path):
    folder, _ = encoded
    control = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX_CONTROL}
    wide = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX_FILL | {"in_channels": 52}}
    refused = {
        ("train", "model={name: flux.1-fill-dev}", "data.fill=false"): (
            "flux.1-fill-dev takes masked images, and data.fill is false; set it to true"
        ),
        ("train", f"model={json.dumps(control)}"): "takes no masked images; leave it out",
        ("train", "data.references=1"): "references and fill are both set",
        ("train", "strategy.features=online", "data.features=null"): "data.fill is true, which needs a cache",
        ("train", "samples={captions: [a, b]}"): "samples.images has 0 for 2 of samples.captions, and data.fill needs",
        ("extract", f"model={json.dumps(wide)}", f"data.features={tmp_path / 'none'}"): (
            "encoders.image gives 8 channels of masked images, and"
        ),
    }
    for (command, *settings), problem in refused.items():
        asked = (*settings, f"output={tmp_path / 'run'}")
        done = in_process(command, "--config", folder / "run.yaml", *with_set(asked))
        assert done.returncode == 1
        assert problem in " ".join(done.stderr.split()), done.stderr
    asked = (f"model={json.dumps(wide)}", f"output={tmp_path / 'run'}")
    refused = refusal(folder / "run.yaml", *asked)
    assert "it has 8 channels of masked images, and FluxTransformer2DModel takes 9" in refused
    colours(9).save(tmp_path / "a.png")
    (tmp_path / "a.mask.png").write_bytes(b"no image")
    drawn = f"samples={{captions: [a], images: [{tmp_path / 'a.png'}]}}"
    assert "cannot be read: a.mask.png: damaged image: " in refusal(folder / "run.yaml", drawn, asked[1])
    colours(9).resize((SIDE // 2, SIDE // 2)).save(tmp_path / "a.mask.png")
    sizes = f"a.mask.png has {SIDE // 2} × {SIDE // 2} pixels, and the image has {SIDE} × {SIDE}; make them equal"
    assert sizes in refusal(folder / "run.yaml", drawn, asked[1])
    (tmp_path / "a.mask.png").unlink()
    painted = (
        f"samples.images: {tmp_path / 'a.png'} has no mask, and the model paints where it is white; put a.mask.png"
    )
    assert painted in refusal(folder / "run.yaml", drawn, asked[1])
