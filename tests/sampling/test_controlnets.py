"""ControlNets from files to samples: diffusers' ControlNet pipeline generates with an export what was sampled."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import tiny_sources
import tiny_vaes
import torch
from commands import in_process, with_set
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from gpus import benched
from PIL import Image
from training import encoded_for, refusal, train_here

from bigdit import objectives
from bigdit.checkpoint import latest
from bigdit.sampling import Sampler, SamplingOptions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("controlnets")]

SD3 = tiny_pipelines.SD3 | {"num_layers": 3}
SIDE = 16


def colours(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The folder of a run over four images with control images, and the parts of its pipeline."""
    folder = tmp_path_factory.mktemp("controlnets")
    torch.manual_seed(0)
    vae = tiny_vaes.kl(shift_factor=0.1, scaling_factor=0.4).eval()
    parts = tiny_pipelines.save(folder / "pipeline", "StableDiffusion3Pipeline")
    transformer = diffusers.SD3Transformer2DModel(**SD3)
    transformer.save_pretrained(folder / "pipeline/transformer")
    for number in range(4):
        tiny_sources.save(folder / f"images/{number}.png", f"a square {number}", colours(number))
        colours(10 + number).save(folder / f"images/{number}.reference.png")
    model = {"class_name": "SD3Transformer2DModel", "kwargs": SD3, "init_from": str(folder / "pipeline/transformer")}
    data = {"buckets": [[SIDE, SIDE]], "references": 1}
    trained = {"controlnet": {"layers": 2}, "ema": {}, "optimizer": {"lr": 0.05}}
    encoded_for(folder, model, vae, data, {"max_tokens": 16}, trained)
    return folder, parts | {"vae": vae, "transformer": transformer}


@pytest.fixture(scope="module")
def trained(encoded):
    """The same, with four steps trained and an image of them. Tests leave it as it is."""
    folder, _ = encoded
    image = folder / "images/0.reference.png"
    train_here(folder / "run.yaml", "samples.captions=[a cat]", f"samples.images=[{image}]", "samples.steps=2",
               "samples.every=4", "samples.seed=5", "train.steps=4")  # fmt: skip
    return encoded


def test_a_step_takes_what_was_predicted(encoded):
    folder, _ = encoded
    receipt, _ = benched("--config", folder / "run.yaml", *with_set(("strategy.checkpointed_blocks=all",)))
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]


def test_the_pipeline_generates_with_what_was_trained(trained, monkeypatch):
    folder, parts = trained
    image = folder / "images/0.reference.png"
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "a cat", "--image", image, "--steps", "2",
                       "--seed", "5", "--ema", "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert (folder / "samples/grid.png").read_bytes() == (folder / "run/samples/step-00000004.png").read_bytes()
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    assert "SD3ControlNetModel.from_pretrained" in " ".join(done.stderr.split())
    assert sorted(each.name for each in (folder / "exported").iterdir()) == [
        "README.md",
        "controlnet",
        "controlnet_ema",
    ]
    controlnet = diffusers.SD3ControlNetModel.from_pretrained(folder / "exported/controlnet")
    average = diffusers.SD3ControlNetModel.from_pretrained(folder / "exported/controlnet_ema")
    # The pipeline draws the image's latents from the VAE's distribution; extraction takes its mode.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    checkpoint, _ = latest(folder / "run")
    sampler = Sampler(checkpoint, torch.device("cpu"))
    options = SamplingOptions(SIDE, SIDE, steps=2, seed=5, guidance=1.0)
    (wanted,) = sampler.generate(["a cat"], options, [Image.open(image)])
    (other,) = sampler.generate(["a cat"], options, [colours(11)])
    noise = objectives.draw_noise(torch.empty(1, 4, 8, 8), [5])
    made = generated(parts, controlnet, Image.open(image), noise)
    assert (made - wanted).norm() < 0.05 * (other - wanted).norm()  # the image's latents were rounded to bf16
    assert not torch.equal(generated(parts, average, Image.open(image), noise), made)


def generated(parts, controlnet, image, noise):
    """The latents of the ControlNet pipeline's call."""
    parts = parts | {"controlnet": controlnet, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    pipeline = tiny_pipelines.pipeline_of("StableDiffusion3ControlNetPipeline", parts)
    pipeline.set_progress_bar_config(disable=True)
    asked = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, "guidance_scale": 1.0}
    return pipeline("a cat", control_image=image, latents=noise, max_sequence_length=16, output_type="latent",
                    **asked).images  # fmt: skip


def test_a_run_resumes_and_what_does_not_fit_is_refused_in_a_line(trained, tmp_path):
    folder, _ = trained
    base = str(folder / "pipeline/transformer")
    flux = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX_CONTROL, "init_from": base}
    refused = {
        ("train", "data.references=0"): (
            "strategy.controlnet takes one image a sample, and data.references is 0; set it to 1"
        ),
        (
            "train",
            "model.init_from=null",
        ): "strategy.controlnet needs trained weights, and model.init_from is missing",
        ("train", "strategy.controlnet.layers=4"): "strategy.controlnet: layers is 4, and SD3Transformer2DModel has 3",
        (
            "train",
            "strategy.controlnet.single_layers=1",
        ): "single_layers is 1, and SD3Transformer2DModel has 0 such blocks",
        ("train", "data.min_references=0"): "data.min_references is 0, and a ControlNet takes an image of each sample",
        ("train", "strategy.lora={}"): "lora and controlnet are both set",
        (
            "train",
            f"model={json.dumps(flux)}",
        ): "takes an image itself, and ControlNets are for models that take only text",
        (
            "train",
            f"model={{class_name: PixArtTransformer2DModel, init_from: {base}}}",
        ): "bigdit trains no ControlNet of PixArtTransformer2DModel",
    }
    for (command, *settings), problem in refused.items():
        done = in_process(
            command, "--config", folder / "run.yaml", *with_set((*settings, f"output={tmp_path / 'run'}"))
        )
        assert done.returncode == 1
        assert problem in " ".join(done.stderr.split()), done.stderr
    alone = (f"model.init_from={folder / 'run/checkpoints/step-00000004'}", f"output={tmp_path / 'run'}")
    assert "holds only a ControlNet; its base is" in refusal(folder / "run.yaml", *alone)
    resumed = f"output={shutil.copytree(folder / 'run', tmp_path / 'resumed')}"
    train_here(folder / "run.yaml", resumed, "train.steps=6")
    assert latest(tmp_path / "resumed")[0].step == 6
    refused = refusal(folder / "run.yaml", resumed, "strategy.controlnet.layers=1")
    assert "was trained with strategy.controlnet.layers 2" in refused
    over_nf4 = ("strategy.controlnet.base=nf4", f"output={tmp_path / 'nf4'}")
    for steps in (2, 3):
        train_here(folder / "run.yaml", *over_nf4, f"train.steps={steps}")
    assert latest(tmp_path / "nf4")[0].step == 3
    image = folder / "images/0.reference.png"
    drawn = in_process("sample", "--checkpoint", tmp_path / "nf4", "--caption", "a cat", "--image", image,
                       "--steps", "2", "--out", tmp_path / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    done = in_process("export", "--checkpoint", folder / "run", "--single-file", "bf16", "--out", tmp_path / "file")
    assert done.returncode == 1
    assert "holds a ControlNet, which is one folder" in " ".join(done.stderr.split())
