"""A model with two text inputs, from images to samples: a pipeline's encoders, an 8-bit store, training."""

import json

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import tiny_vaes
import torch
import yaml
from commands import in_process
from safetensors.torch import load_file
from stores import read_rows
from tiny_pipelines import SD3
from training import train_here

from bigdit.store import FeatureStore
from bigdit.store.text import dequantise, quantise

CLASS = "SD3Transformer2DModel"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def config(folder, images):
    return {
        "model": {"class_name": CLASS, "kwargs": SD3},
        "data": {"images": str(images), "features": str(folder / "features"), "buckets": [[16, 16]]},
        "encoders": {
            "image": {"name": "vae", "class_name": "AutoencoderKL", "path": str(folder / "vae")},
            "text": {"pipeline": str(folder / "pipeline"), "stored": "fp8"},
        },
        "objective": {"shift": 3.0},
        "strategy": {"micro_batch_size": 4, "precision": "fp32"},
        "train": {"steps": 2},
        "output": str(folder / "run"),
    }


@pytest.mark.slow
def test_stable_diffusion_3_is_encoded_trained_and_sampled(tmp_path, images):
    torch.manual_seed(0)
    tiny_vaes.kl(shift_factor=0.0609).save_pretrained(tmp_path / "vae")
    (tmp_path / "pipeline").mkdir()
    parts = tiny_pipelines.save(tmp_path / "pipeline", "StableDiffusion3Pipeline")
    few = tmp_path / "images"
    few.mkdir()
    for file in sorted(images.iterdir())[:32]:  # sixteen digits and their captions
        (few / file.name).write_bytes(file.read_bytes())
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(config(tmp_path, few)))

    done = in_process("extract", "--config", run, "--workers", "1", "--json")
    assert done.returncode == 0, done.stderr
    store = FeatureStore.open(tmp_path / "features")
    pipeline = tiny_pipelines.pipeline_of("StableDiffusion3Pipeline", parts)
    latents, texts, indices = read_rows(store, (4, 8, 8), [3])
    caption = sorted(few.glob("*.txt"))[indices[0]].read_text().strip()
    with torch.no_grad():
        states, null, pooled, _ = pipeline.encode_prompt([caption], None, None, device="cpu")
    assert latents.shape == (1, 4, 8, 8)
    assert torch.allclose(texts[0].states.float(), dequantise(*quantise(states[0].bfloat16())).float(), atol=1e-6)
    assert (texts[0].states.float() - states[0]).norm() < 0.03 * states.norm()
    assert torch.equal(texts[0].pooled, pooled[0].bfloat16())
    assert torch.allclose(store.null_text.states.float(), null[0], rtol=2**-7, atol=1e-4)

    train_here(run)
    done = in_process("sample", "--checkpoint", tmp_path / "run", "--caption", "a handwritten six", "--size", "16x16",
                      "--steps", "2", "--out", tmp_path / "samples", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["images"]) == 1

    done = in_process("export", "--checkpoint", tmp_path / "run", "--out", tmp_path / "alone")
    assert done.stderr.splitlines()[0] == (
        "note: the transformer is written without a pipeline: "
        f"{tmp_path}/pipeline/model_index.json has no {CLASS} as its transformer"
    )
    index = tmp_path / "pipeline/model_index.json"
    of_diffusers = {"transformer": CLASS, "scheduler": "FlowMatchEulerDiscreteScheduler"}
    named = {name: ["diffusers", class_name] for name, class_name in of_diffusers.items()}
    index.write_text(json.dumps(json.loads(index.read_text()) | named))
    done = in_process("export", "--checkpoint", tmp_path / "run", "--out", tmp_path / "whole")
    assert (done.returncode, "note: " in done.stderr) == (0, False), done.stderr
    whole = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "whole")
    whole.set_progress_bar_config(disable=True)
    assert whole.scheduler.config.shift == 3.0
    trained = load_file(tmp_path / "alone/transformer" / WEIGHTS)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in whole.transformer.named_parameters())
    drawn = whole("a handwritten six", height=16, width=16, num_inference_steps=2, output_type="np").images
    assert (drawn.shape, bool(np.isfinite(drawn).all())) == ((1, 16, 16, 3), True)
