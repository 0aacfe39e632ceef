"""Qwen-Image's edits from files to samples: texts depend on the image, and references have another size."""

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
from training import encoded_for, exported, train_here

from bigdit import models
from bigdit.catalog import model
from bigdit.catalog.models import batch_shape
from bigdit.checkpoint import latest
from bigdit.encoders.latents import bucket_pixels
from bigdit.loader.stream import BatchReader
from bigdit.models.packing import pack
from bigdit.sampling import Sampler
from bigdit.store import FeatureStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("qwen edits")]

SHAPE = (4, 8, 12)  # of 64 × 96 pixels
SEEN = (832, 1248)
"""A reference in the bucket's ratio, as both pipelines make it."""
CATALOGUE = {"QwenImageEditPipeline": "qwen-image-edit", "QwenImageEditPlusPipeline": "qwen-image-edit-plus"}
CAPTIONS = ["make it snow", "make it " * 40]


def colours(seed, height, width):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="module", params=CATALOGUE)
def encoded(request, tmp_path_factory):
    """The folder of a run over two encoded edits, and its pipeline without a transformer."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    torch.manual_seed(0)
    vae = tiny_vaes.qwen_image_of_8()
    parts = tiny_pipelines.save(folder / "pipeline", name)
    for number, caption in enumerate([*CAPTIONS, "no reference"]):
        tiny_sources.save(folder / f"images/{number}.png", caption, colours(number, 64, 96))
    for number in range(2):
        colours(10 + number, 80, 110).save(folder / f"images/{number}.reference.png")
    qwen = {"class_name": "QwenImageTransformer2DModel", "kwargs": tiny_pipelines.QWEN_IMAGE}
    encoded_for(folder, qwen, vae, {"buckets": [[64, 96]], "references": 1}, {"max_tokens": 128})
    parts |= {"vae": vae.eval(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    return folder, tiny_pipelines.pipeline_of(name, parts)


def reference_of(folder, number):
    """The file's image in its bucket's ratio, as extraction has it."""
    with Image.open(folder / f"images/{number}.reference.png") as image:
        return Image.fromarray(bucket_pixels(image, [SEEN], "rgb")[1].transpose(1, 2, 0))


def edit(pipeline, transformer, folder, number, caption, adapters=None, steps=1, references=None):
    """The latents of the pipeline's call with one or several references, and the first inputs of its transformer."""
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    whole = tiny_pipelines.pipeline_of(type(pipeline).__name__, parts | {"transformer": transformer})
    whole.set_progress_bar_config(disable=True)
    if adapters is not None:
        whole.load_lora_weights(adapters)
    calls = []
    hook = transformer.register_forward_hook(
        lambda module, args, fed, answer: calls.append((fed, answer[0])), with_kwargs=True
    )
    asked = {"height": 64, "width": 96, "num_inference_steps": steps, "output_type": "latent"}
    with torch.no_grad():
        given = references or reference_of(folder, number)
        made = whole(given, caption, generator=torch.Generator().manual_seed(0), **asked).images
    hook.remove()
    return made, calls[0]


@pytest.mark.parametrize("references_at_0", [False, True])  # as in 2511
def test_a_batch_is_what_the_pipeline_feeds_its_transformer(encoded, references_at_0):
    folder, pipeline = encoded
    store = FeatureStore.open(folder / "features")
    kwargs = tiny_pipelines.QWEN_IMAGE | {"zero_cond_t": references_at_0}
    transformer = diffusers.QwenImageTransformer2DModel(**kwargs).eval()
    rows = torch.tensor([[0, 0], [1, 0]]).numpy()
    read, dropped = (BatchReader(store, 2, share, pinned=False).read(SHAPE, *rows, [1, 2]) for share in (0.0, 1.0))
    for place, number, batch, caption in ((1, 0, read, CAPTIONS[0]), (0, 1, dropped, "")):
        _, (fed, answer) = edit(pipeline, transformer, folder, number, caption)
        texts, tokens = fed["encoder_hidden_states"], fed["hidden_states"]
        count = int(batch.text_mask[place].float().sum())
        assert torch.equal(batch.text_embeds[place, :count], texts[0].bfloat16())
        own = SHAPE[1] * SHAPE[2] // 4
        references = pack(batch.extras["reference"][place : place + 1, 0]).float()
        assert torch.allclose(references, tokens[:, own:], rtol=2**-7, atol=1e-4)  # rounded, and made in a batch
        # The prediction from the pipeline's own inputs, with a batch's padding.
        padding = store.max_tokens - texts.shape[1]
        given = type(batch)(
            None,
            torch.nn.functional.pad(texts, (0, 0, 0, padding)),
            batch.text_mask[place : place + 1],
            (0,),
            {"reference": models.packing.unpack(tokens[:, own:], *(side // 8 for side in SEEN))[:, None]},
        )
        latents = models.packing.unpack(tokens[:, :own], *SHAPE[1:])
        with torch.no_grad():
            found = models.family("QwenImageTransformer2DModel").predict(transformer, latents, fed["timestep"], given)
        assert torch.allclose(pack(found), answer[:, :own], rtol=1e-4, atol=1e-5)
    assert not torch.equal(read.text_embeds[0], dropped.text_embeds[0])


def test_a_caption_that_is_too_long_is_cut_and_one_without_reference_is_skipped(encoded):
    folder, _ = encoded
    report = json.loads((folder / "features/report.json").read_text())
    assert [(each["name"], each["reason"]) for each in report["skipped"]] == [
        ("2.png", "reference 2.reference.png is missing")
    ]
    (cut,) = report["cut"]
    assert report["captions"] == 2
    assert (cut["captions"], cut["samples"], cut["key"]) == (1, ["1.png"], "encoders.text.max_tokens")


def test_the_catalogue_counts_the_tokens_of_the_pipeline(encoded):
    folder, pipeline = encoded
    known = model(CATALOGUE[type(pipeline).__name__])
    shape, store = batch_shape(known, (64, 96)), FeatureStore.open(folder / "features")
    assert shape.reference[1:] == store.frame_shapes(SHAPE)["reference"][2:] == (104, 156)
    assert shape.text[0] - known.text.tokens == store.max_tokens - 128


@pytest.mark.parametrize("encoded", ["QwenImageEditPlusPipeline"], indirect=True)
def test_a_step_takes_what_was_predicted_and_the_pipeline_edits_with_what_was_trained(encoded):
    folder, pipeline = encoded
    receipt, _ = benched("--config", folder / "run.yaml")
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    torch.manual_seed(1)
    base = diffusers.QwenImageTransformer2DModel(**tiny_pipelines.QWEN_IMAGE).bfloat16().float()
    base.save_pretrained(folder / "base/transformer")
    asked = ("strategy.lora={rank: 2, alpha: 4}", "strategy.precision=bf16", "strategy.optimizer.lr=0.05",
             "train.checkpoint_every=2", f"model.init_from={folder / 'base/transformer'}",
             "samples.captions=[make it red]", f"samples.images=[{folder / 'images/0.png'}]", "samples.steps=1",
             "samples.every=2", "samples.seed=5")  # fmt: skip
    train_here(folder / "run.yaml", *asked)
    drawn = in_process("sample", "--checkpoint", folder / "run", "--caption", "make it red", "--image",
                       folder / "images/0.png", "--steps", "1", "--seed", "5", "--out", folder / "samples")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert (folder / "samples/grid.png").read_bytes() == (folder / "run/samples/step-00000002.png").read_bytes()
    checkpoint, _ = latest(folder / "run")
    without, _ = edit(pipeline, base, folder, 1, "make it red")
    trained, _ = edit(pipeline, Sampler(checkpoint, torch.device("cpu")).model().float(), folder, 1, "make it red")
    adapters = folder / "run/exports/step-00000002/transformer"
    loaded, _ = edit(pipeline, base, folder, 1, "make it red", adapters)
    assert (loaded - trained).norm() < 0.02 * (loaded - without).norm()  # its adapters are rounded, too
    assert (loaded - without).abs().max() > 0.01


@pytest.mark.parametrize("encoded", ["QwenImageEditPlusPipeline"], indirect=True)
def test_what_does_not_fit_is_refused_in_a_line(encoded, tmp_path):
    folder, pipeline = encoded
    name, fresh = type(pipeline).__name__, (f"output={tmp_path / 'run'}", f"data.features={tmp_path / 'none'}")
    refused = {
        ("data.references=0",): "reads the images to edit, and data.references is 0; set it to 1 to 3",
        ("data.buckets=[[64, 320]]",): f"data.buckets has 64 × 320; with {name} a side is at most 4 times the other",
        (
            "data.min_references=0",
        ): f"data.min_references is 0, and the text encoder of {name} reads the images to edit",
        ("encoders.text.max_tokens=20",): "encoders.text.max_tokens is 20, and the template takes",
    }
    for settings, problem in refused.items():
        done = in_process("extract", "--config", folder / "run.yaml", *with_set((*fresh, *settings)))
        assert done.returncode == 1
        assert problem in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("encoded", ["QwenImageEditPlusPipeline"], indirect=True)
def test_samples_of_one_and_of_two_references_are_what_the_pipeline_makes_of_them(encoded, tmp_path):
    """They train in batches of one number."""
    folder, pipeline = encoded
    pair = [str(folder / f"images/{number}.reference.png") for number in (1, 0)]
    given = [pair, pair[:1], pair[1:], [], [*pair, pair[0]]]
    rows = [
        {"image": str(folder / f"images/{number % 3}.png"), "caption": "put it", "reference": each}
        for number, each in enumerate(given)
    ]
    (tmp_path / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = (f"data.images={tmp_path / 'list.jsonl'}", f"data.features={tmp_path / 'features'}",
                "data.references=2", "data.min_references=1", "data.caption_dropout=0", "strategy.micro_batch_size=1",
                "train.lr_schedule=constant")  # fmt: skip
    done = in_process("extract", "--workers", "1", "--config", folder / "run.yaml", *with_set(settings))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "features/report.json").read_text())
    assert report["buckets"] == {"4x8x12": 1, "4x8x12r1": 2}
    assert [each["reason"] for each in report["skipped"]] == [
        "column reference names no image (list.jsonl row 4)",
        "column reference names 3 images, and data.references is 2 (list.jsonl row 5)",
    ]
    store = FeatureStore.open(tmp_path / "features")
    reader, (both, one) = BatchReader(store, 2, 0.0, pinned=False), store.buckets
    batch, ones = (
        reader.read(shape, *torch.tensor([[0] * count, [*range(count)]]).numpy(), [*range(count)])
        for shape, count in ((both, 1), (one, 2))
    )
    assert [tuple(each.extras["reference"].shape[:2]) for each in (batch, ones)] == [(1, 2), (2, 1)]
    for number in range(2):
        assert torch.equal(batch.extras["reference"][0, number], ones.extras["reference"][number, 0])
    transformer = diffusers.QwenImageTransformer2DModel(**tiny_pipelines.QWEN_IMAGE).eval()
    references = [reference_of(folder, number) for number in (1, 0)]
    _, (fed, answer) = edit(pipeline, transformer, folder, 0, "put it", references=references)
    count = int(batch.text_mask[0].float().sum())
    assert torch.equal(batch.text_embeds[0, :count], fed["encoder_hidden_states"][0].bfloat16())
    own = SHAPE[1] * SHAPE[2] // 4
    latents = models.packing.unpack(fed["hidden_states"][:, :own], *SHAPE[1:])
    shown = type(batch)(None, batch.text_embeds.float(), batch.text_mask, (0,),
                        {"reference": batch.extras["reference"].float()})  # fmt: skip
    with torch.no_grad():
        found = models.family("QwenImageTransformer2DModel").predict(transformer, latents, fed["timestep"], shown)
    assert torch.allclose(pack(found), answer[:, :own], atol=0.02 * answer.abs().max().item())  # rounded to bf16
    receipt, _ = benched("--config", folder / "run.yaml", *with_set(settings))
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    runs = [tmp_path / name for name in ("whole", "resumed")]
    drawn = f"samples={{captions: [put it], images: [{pair[0]}, {pair[1]}], steps: 1}}"
    for output, steps in ((runs[0], 3), (runs[1], 1), (runs[1], 3)):
        more = (drawn,) if steps == 1 else ()
        train_here(folder / "run.yaml", *settings, f"output={output}", f"train.steps={steps}", *more)
    whole, resumed = (exported(latest(output)[0], "transformer") for output in runs)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for count, images in ((1, pair[:1]), (2, pair)):
        pictures = [part for each in images for part in ("--image", each)]
        done = in_process("sample", "--checkpoint", runs[0], "--caption", "put it", *pictures, "--steps", "1",
                          "--out", tmp_path / f"samples{count}")  # fmt: skip
        assert done.returncode == 0, done.stderr
    pictures = [part for each in (*pair, pair[0]) for part in ("--image", each)]
    done = in_process("sample", "--checkpoint", runs[0], "--caption", "put it", *pictures, "--out", tmp_path / "none")
    assert ": found 3 images for 1 caption; pass 2 " in " ".join(done.stderr.split())
    refused = {"null": "encoded with data.min_references 1, and the run has none",
               "3": "min_references is 3, and references is 2"}  # fmt: skip
    for least, problem in refused.items():
        others = (each.replace("min_references=1", f"min_references={least}") for each in settings)
        done = in_process("train", "--dry-run", "--config", folder / "run.yaml", *with_set([*others]))
        assert problem in " ".join(done.stderr.split())
