"""Edit models from files to samples: they get of a reference what their pipeline makes of it."""

import csv
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
from gpus import benched
from PIL import Image
from training import encoded_for, exported, refusal, train_here

from bigdit.checkpoint import latest
from bigdit.encoders.latents import bucket_pixels
from bigdit.loader.stream import BatchReader
from bigdit.sampling import Sampler
from bigdit.store import FeatureStore
from bigdit.store.reader import Part

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("edits")]

PIPELINE = "FluxKontextPipeline"
SHAPE = (4, 8, 8)  # of 16 × 16 pixels


def colours(seed, side=16):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The folder of a run over four encoded edits, and its pipeline without a transformer."""
    folder = tmp_path_factory.mktemp("edits")
    torch.manual_seed(0)
    vae = tiny_vaes.kl(shift_factor=0.1, scaling_factor=0.4).eval()
    parts = tiny_pipelines.save(folder / "pipeline", PIPELINE)
    for number in range(5):
        tiny_sources.save(folder / f"images/{number}.png", f"make it {number}", colours(number))
    for number, suffix in enumerate(("png", "jpg", "webp", "png")):
        colours(10 + number, side=24).save(folder / f"images/{number}.reference.{suffix}")
    flux = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX}
    encoded_for(folder, flux, vae, {"buckets": [[16, 16]], "references": 1}, {"max_tokens": 16})
    parts |= {"vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return folder, tiny_pipelines.pipeline_of(PIPELINE, parts)


def reference_of(folder, number):
    """The file's image in its bucket, as extraction has it."""
    (path,) = (folder / "images").glob(f"{number}.reference.*")
    with Image.open(path) as image:
        return Image.fromarray(bucket_pixels(image.convert("RGB"), [(16, 16)], "rgb")[1].transpose(1, 2, 0))


def test_batches_have_the_latents_that_the_pipeline_makes_to_the_bit(encoded):
    folder, pipeline = encoded
    store = FeatureStore.open(folder / "features")
    assert store.schema.references == 1
    reader = BatchReader(store, 4, 1.0, pinned=False)  # captions are dropped, references are not
    for _ in range(2):  # also in memory that is used again
        batch = reader.read(SHAPE, *torch.tensor([[0, 0, 0, 0], [3, 0, 2, 1]]).numpy(), [1, 2, 3, 4])
        assert set(batch.extras) == {"pooled_text", "reference"}
        for place, number in enumerate([3, 0, 2, 1]):
            pixels = pipeline.image_processor.preprocess(reference_of(folder, number), 16, 16)
            with torch.no_grad():
                latents = pipeline._encode_vae_image(pixels, None)
            assert torch.equal(batch.extras["reference"][place], latents.bfloat16())
        del batch


def test_an_image_without_its_reference_is_skipped_with_the_reason(encoded):
    folder, _ = encoded
    report = json.loads((folder / "features/report.json").read_text())
    assert report["encoded"] == 4
    assert [(each["name"], each["reason"]) for each in report["skipped"]] == [
        ("4.png", "reference 4.reference.png is missing")
    ]


def test_a_step_takes_what_was_predicted_and_the_pipeline_edits_with_what_was_trained(encoded):
    folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    seen = ("samples.captions=[make it red, blue]", f"samples.images=[{folder / 'images/0.png'}]")
    train_here(folder / "run.yaml", *seen, "samples.steps=2", "samples.every=2", "samples.seed=5")
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "make it red", "--caption", "blue",
                       "--image", folder / "images/0.png", "--steps", "2", "--seed", "5",
                       "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    seen = folder / "run/samples/step-00000002.png"
    assert (folder / "samples/grid.png").read_bytes() == seen.read_bytes()
    done = in_process("export", "--checkpoint", folder / "run", "--out", folder / "exported")
    assert done.returncode == 0, done.stderr
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(folder / "exported/transformer")
    edited = edit(pipeline, transformer, folder, 1)
    other = edit(pipeline, transformer, folder, 2)
    assert edited.shape == (1, 16, 16)
    assert not torch.equal(edited, other)  # each is an edit of its own image


def edit(pipeline, transformer, folder, number, adapters=None):
    """The latents of the pipeline's call with a reference."""
    whole = tiny_pipelines.pipeline_of(PIPELINE, pipeline.components | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    if adapters is not None:
        whole.load_lora_weights(adapters)
    asked = {"height": 16, "width": 16, "max_area": 16 * 16, "_auto_resize": False, "num_inference_steps": 2}
    seeded = {"generator": torch.Generator().manual_seed(0), "output_type": "latent", "max_sequence_length": 16}
    with torch.no_grad():
        return whole(reference_of(folder, number), "a square", guidance_scale=1.0, **asked, **seeded).images


def test_the_pipeline_edits_with_exported_adapters_as_training_would(encoded):
    folder, pipeline = encoded
    torch.manual_seed(1)
    base = diffusers.FluxTransformer2DModel(**tiny_pipelines.FLUX).bfloat16().float()  # rounded, as training loads it
    base.save_pretrained(folder / "base/transformer")
    asked = (
        "strategy.lora={rank: 2, alpha: 4}",
        "strategy.precision=bf16",
        "strategy.optimizer.lr=0.05",
        "train.checkpoint_every=2",
        f"model.init_from={folder / 'base/transformer'}",
        f"output={folder / 'lora'}",
    )
    train_here(folder / "run.yaml", *asked)
    checkpoint, _ = latest(folder / "lora")
    without = edit(pipeline, base, folder, 1)
    trained = edit(pipeline, Sampler(checkpoint, torch.device("cpu")).model().float(), folder, 1)
    loaded = edit(pipeline, base, folder, 1, folder / "lora/exports/step-00000002/transformer")
    assert (loaded - trained).norm() < 0.02 * (loaded - without).norm()  # its adapters are rounded, too
    assert (loaded - without).abs().max() > 0.01


def test_a_control_model_takes_its_reference_in_further_channels(encoded, tmp_path):
    folder, pipeline = encoded
    model = {"class_name": "FluxTransformer2DModel", "kwargs": tiny_pipelines.FLUX_CONTROL}
    settings = (f"model={json.dumps(model)}", f"output={tmp_path / 'run'}")
    receipt, _ = benched("--config", folder / "run.yaml", *with_set(settings))
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    train_here(folder / "run.yaml", *settings)
    done = in_process("export", "--checkpoint", tmp_path / "run", "--out", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "exported/transformer")
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    whole = tiny_pipelines.pipeline_of("FluxControlPipeline", parts | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    asked = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent", "max_sequence_length": 16}
    with torch.no_grad():
        made = [
            whole(
                "a square",
                control_image=reference_of(folder, number),
                generator=torch.Generator().manual_seed(0),
                **asked,
            ).images
            for number in (1, 2)
        ]
    assert not torch.equal(*made)
    refused = refusal(folder / "run.yaml", *settings, "data.references=0")
    assert "data.references gives 0 references a sample" in refused


def test_what_does_not_fit_is_refused_in_a_line(encoded, tmp_path):
    folder, _ = encoded
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "images/0.png", tmp_path / "alone/0.png")
    shutil.copy(folder / "images/0.txt", tmp_path / "alone/0.txt")
    kontext = ("model={name: flux.1-kontext-dev}", "data.references=0")
    fresh = f"output={tmp_path / 'run'}"
    refused = {
        ("train", kontext): "data.references gives 0 references a sample, and flux.1-kontext-dev takes 1 image",
        ("train", ("data.references=0",)): "it was encoded with data.references 1, and the run has 0",
        ("train", ("data.references=2",)): "2 references a sample, and FluxTransformer2DModel takes 1; set it to 1",
        (
            "train",
            ("samples={captions: [a, b]}",),
        ): "samples.images has 0 for 2 of samples.captions, and data.references",
        ("train", ("strategy.features=online", "data.features=null")): "data.references is 1, which needs a cache",
        ("extract", (f"data.images={tmp_path / 'alone'}", f"data.features={tmp_path / 'none'}")): (
            f"data.references is 1, and {tmp_path / 'alone'} holds no references; put x.reference.png beside x.png"
        ),
        ("extract", ("model={class_name: SanaTransformer2DModel}",)): (
            "data.references gives 1 reference a sample, and SanaTransformer2DModel takes none"
        ),
    }
    for (command, settings), problem in refused.items():
        if command == "train":
            printed = refusal(folder / "run.yaml", fresh, *settings)
        else:
            done = in_process(command, "--config", folder / "run.yaml", *with_set((fresh, *settings)))
            assert done.returncode == 1
            printed = " ".join(done.stderr.split())
        assert problem in printed


def test_a_table_names_references_and_gives_the_same_latents(encoded, tmp_path):
    folder, _ = encoded
    rows = [(f"images/{at}.png", f"make it {at}", next((folder / "images").glob(f"{at}.reference.*"))) for at in (0, 1)]
    rows += [("images/2.png", "make it 2", ""), ("images/3.png", "make it 3", folder / "none.png")]
    with open(folder / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "caption", "reference"), *rows])
    settings = with_set((f"data.images={folder / 'list.csv'}", f"data.features={tmp_path / 'features'}"))
    done = in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "features/report.json").read_text())
    assert [each["reason"] for each in report["skipped"]] == [
        "column reference names no image (list.csv row 3)",
        "reference: image none.png is missing (list.csv row 4)",
    ]
    stores = [FeatureStore.open(each) for each in (folder / "features", tmp_path / "features")]
    places = torch.tensor([[0, 0], [0, 1]]).numpy()
    read = [BatchReader(each, 2, 0.0, pinned=False).read(SHAPE, *places, [1, 2]) for each in stores]
    assert torch.equal(read[0].extras["reference"], read[1].extras["reference"])


def test_only_edits_of_a_changed_reference_are_encoded_again(encoded, tmp_path):
    folder, _ = encoded
    shutil.copytree(folder / "images", tmp_path / "images")
    settings = with_set((f"data.images={tmp_path / 'images'}", f"data.features={tmp_path / 'features'}"))
    assert in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *settings).returncode == 0
    colours(20).save(tmp_path / "images/0.reference.png")
    done = in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *settings)
    assert done.returncode == 0, done.stderr
    assert "1 edited: 0.png" in " ".join(done.stderr.split())


def test_a_reference_whose_bytes_changed_is_named(encoded, tmp_path):
    folder, _ = encoded
    (file,) = (folder / "features").glob("part-*.safetensors")
    data = bytearray(file.read_bytes())
    column = Part.open(file).header.columns["reference/4x8x8"]
    data[column.offset + column.row_bytes + 5] ^= 1
    (tmp_path / file.name).write_bytes(data)
    (problem,) = Part.open(tmp_path / file.name).damages()
    assert "is damaged in the reference of row 1 of 4x8x8: its digest differs" in problem


def test_edits_and_images_from_text_train_in_one_run(encoded, tmp_path):
    folder, _ = encoded
    settings = (f"data.features={tmp_path / 'features'}", "data.min_references=0", "strategy.micro_batch_size=1",
                "train.lr_schedule=constant")  # fmt: skip
    done = in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *with_set(settings))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "features/report.json").read_text())
    assert (report["buckets"], report["skipped"]) == ({"4x8x8": 4, "4x8x8r0": 1}, [])
    done = in_process("features", "verify", tmp_path / "features")
    assert done.returncode == 0, done.stderr
    store = FeatureStore.open(tmp_path / "features")
    edits, plain = store.buckets
    reader, of_first = BatchReader(store, 1, 0.0, pinned=False), torch.tensor([[0], [0]]).numpy()
    found = [set(reader.read(shape, *of_first, [1]).extras) for shape in (edits, plain, edits)]
    assert found == [{"pooled_text", "reference"}, {"pooled_text"}, {"pooled_text", "reference"}]
    runs = [tmp_path / name for name in ("whole", "resumed")]
    for output, steps in ((runs[0], 8), (runs[1], 3), (runs[1], 8)):
        train_here(folder / "run.yaml", *settings, f"output={output}", f"train.steps={steps}")
    whole, resumed = (exported(latest(output)[0], "transformer") for output in runs)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for count in range(2):
        pictures = ("--image", folder / "images/0.png") * count
        drawn = in_process("sample", "--checkpoint", runs[0], "--caption", "red", *pictures, "--steps", "1",
                           "--out", tmp_path / f"samples{count}")  # fmt: skip
        assert drawn.returncode == 0, drawn.stderr
