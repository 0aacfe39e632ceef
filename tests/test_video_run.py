"""Video models from files to samples: clips, a pipeline's encoders, a store of latents with frames, training."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines
import torch
from commands import in_process
from gpus import benched
from PIL import Image, ImageSequence
from stores import read_rows
from tiny_vaes import VIDEO_VAES
from tiny_videos import moving_square
from training import encoded_for, refusal

from bigdit.sampling.grid import stills_png
from bigdit.store import FeatureStore

TINY = json.loads((Path(__file__).parent / "models/tiny_video.json").read_text())
# By pipeline: the VAE, the tiny transformer, and its argument for the width of text.
FAMILIES = {
    "WanPipeline": ("AutoencoderKLWan", "wan-t2v", "text_dim"),
    "CogVideoXPipeline": ("AutoencoderKLCogVideoX", "cogvideox-rotary", "text_embed_dim"),
}


ROUNDING = 1  # other batch sizes take other kernels: one step of 255 at a rounding border


def frames_of(file):
    with Image.open(file) as video:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)])


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("videos")]


@pytest.fixture(scope="module", params=FAMILIES)
def encoded(request, tmp_path_factory):
    """A pipeline, its parts, and the folder of a run over eight encoded clips."""
    pipeline, folder = request.param, tmp_path_factory.mktemp(request.param)
    vae, name, width = FAMILIES[pipeline]
    torch.manual_seed(0)
    made = VIDEO_VAES[vae][0]()
    (folder / "pipeline").mkdir()
    parts = tiny_pipelines.save(folder / "pipeline", pipeline)
    (folder / "clips").mkdir()
    for number in range(8):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0, frames=4 if number == 7 else 12)
    data = {"images": str(folder / "clips"), "buckets": [[5, 16, 32], [3, 16, 32]], "fps": 8}
    model = {"class_name": TINY[name]["class_name"], "kwargs": TINY[name]["kwargs"] | {width: 16}}
    printed = encoded_for(folder, model, made, data)
    assert "videos/s" in printed
    assert "images" not in printed.replace(str(folder), "")
    return pipeline, parts, folder


def test_the_store_has_latents_of_frames_and_what_was_too_short_by_name(encoded):
    pipeline, parts, folder = encoded
    report = json.loads((folder / "features/report.json").read_text())
    assert report["buckets"] == {"4x3x8x16": 7}
    (skipped,) = report["skipped"]  # a quarter of a second
    assert skipped["name"] == "7.mp4"
    assert skipped["reason"] == "video of 2 frames at data.fps; the shortest bucket has 3"
    latents, texts, _ = read_rows(FeatureStore.open(folder / "features"), (4, 3, 8, 16), [1])
    with torch.no_grad():
        states = tiny_pipelines.pipeline_of(pipeline, parts).encode_prompt(["a square that moves to the left"])[0][0]
    assert latents.shape == (1, 4, 3, 8, 16)
    assert torch.allclose(texts[0].states.float(), states[: len(texts[0].states)], rtol=2**-7, atol=1e-3)


def test_a_step_takes_what_was_predicted_and_samples_move(encoded):
    _, _, folder = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["batch"]["latents"] == [4, 3, 8, 16]
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    drawn = "samples={captions: [a square, two], every: 1, steps: 2}"
    done = in_process("train", "--config", folder / "run.yaml", "--set", drawn)
    assert done.returncode == 0, done.stderr
    done = in_process("sample", "--checkpoint", folder / "run", "--caption", "a square", "--caption", "two",
                      "--steps", "2", "--out", folder / "samples", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [row["file"] for row in json.loads(done.stdout)["images"]]
    with Image.open(folder / "samples" / files[1]) as video, Image.open(folder / "samples/grid.webp") as grid:
        video.load()  # how long the first frame is shown
        assert (video.n_frames, video.size, video.info["duration"]) == (5, (32, 16), 125)
        assert grid.n_frames == 5
        assert grid.width > 2 * 32 * 6  # enlarged to be seen
        with Image.open(folder / "run/samples/step-00000002.webp") as on_the_way:
            on_the_way.load()
            found = (on_the_way.n_frames, on_the_way.size, on_the_way.info["duration"])
            assert found == (5, grid.size, 125)
    stills = stills_png([frames_of(folder / "samples" / file) for file in files], ["a square", "two"])
    with Image.open(folder / "run/samples/step-00000002.png") as on_the_way, Image.open(io.BytesIO(stills)) as wanted:
        assert np.abs(np.asarray(on_the_way).astype(int) - np.asarray(wanted)).max() <= ROUNDING
    assert sorted(path.name for path in (folder / "run/samples").glob("*1.*")) == [
        *("step-00000001.png", "step-00000001.webp"),
    ]
    assert 'href="samples/step-00000001.webp"' in (folder / "run/report.html").read_text()


def test_a_store_of_another_rate_is_refused(encoded):
    _, _, folder = encoded
    refused = refusal(folder / "run.yaml", "data.fps=4", f"output={folder}/other")
    assert "it was encoded with data.fps 8.0, and the run has 4.0" in refused
