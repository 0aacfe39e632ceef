"""The disk space of a data set and the CPU memory of its extraction, beside a real store, a real process, and
hand-made figures."""

import sys

import pytest
import torch
from commands import run_command
from hypothesis import given
from hypothesis import strategies as st

from bigdit import catalog
from bigdit.memory import Block, Span, Timeline
from bigdit.profile.gpus import EmulatedGpus
from bigdit.search.dataset import EncoderBytes, EncodersNeed, _room_notes, dataset_need, encoding_requests
from bigdit.search.plan import LIBRARIES_BYTES, host_need
from bigdit.search.resolve import resolve_request
from bigdit.sources.protocol import Caption
from bigdit.speed.seconds import Cluster
from bigdit.store.part import EncodedRange, write_part
from bigdit.store.text import Text
from bigdit.units import GIB, KIB, MIB, on_disk


def need(name, encoding=(), **options):
    request = resolve_request(name, "a100-80g-sxm", **options)
    batch = catalog.batch_shape(request.model, request.resolution, request.frames)
    return dataset_need(request, batch, dict(encoding))


def test_a_real_store_takes_as_many_bytes(tmp_path):
    """Two parts of extraction's store for PixArt-Sigma at 256, without headers and captions."""
    need_of = need("pixart-sigma-xl-2-256", images=1)
    sizes = []
    for count in (1, 9):
        texts = {f"{index:04d}": Text(torch.zeros(100, 4096, dtype=torch.bfloat16)) for index in range(count)}
        encoded = EncodedRange(
            latents={(4, 32, 32): torch.zeros(count, 4, 32, 32, dtype=torch.bfloat16)},
            indices={(4, 32, 32): list(range(count))},
            captions={index: (Caption(text),) for index, text in enumerate(texts)},
            texts=texts,
            skipped=[],
        )
        write_part(tmp_path / f"{count}.safetensors", encoded, identity="")
        sizes.append((tmp_path / f"{count}.safetensors").stat().st_size)
    rows = need_of.store_bytes.low - need_of.latent_bytes - need_of.text_bytes.low
    wanted = need_of.latent_bytes + rows + 100 * 4096 * 2
    captions = len('"0": [["0000", 1.0]], ')
    assert (sizes[1] - sizes[0]) / 8 == pytest.approx(wanted + captions, abs=8)  # the header's numbers grow, too


def test_padded_text_is_reported_before_it_fills_a_disk():
    found = need("pixart-sigma-xl-2-1024", images="30M")
    assert found.latent_bytes == 4 * 128 * 128 * 2
    assert found.padded_text_bytes == 300 * 4096 * 2
    assert (found.text_bytes.low, found.text_bytes.high) == (49 * 8192, 168 * 8192)
    assert found.store_bytes.high == 30_000_000 * (131_072 + 168 * 8192 + 72)
    assert found.notes[0] == (
        "padded to 300 × 4096 in bf16, the text of each image takes 2.46 MB, and that of all 73.7 TB; it is "
        "stored without padding: 401 kB to 1.38 MB each, with captions of 49 tokens (two or three sentences) to "
        "168 (detailed ones) on the mean"
    )


def test_captions_are_cut_to_what_the_model_is_fed():
    found = need("pixart-alpha-xl-2-256", images=1000)
    assert found.text_bytes.high == found.padded_text_bytes == 120 * 8192
    assert "49 tokens (two or three sentences) to 120 (detailed ones)" in found.notes[0]


def test_without_captions_the_store_is_known_exactly():
    found = need("dit-xl-2", images=1_281_167)
    assert found.text_bytes.high == found.padded_text_bytes == 0
    assert found.store_bytes.low == found.store_bytes.high == 1_281_167 * (4 * 32 * 32 * 2 + 40)


def test_a_real_store_of_classes_takes_as_many_bytes(tmp_path):
    sizes = []
    for count in (100, 900):  # in whose headers no number grows
        indices = list(range(count))
        latents = torch.zeros(count, 4, 32, 32, dtype=torch.bfloat16)
        encoded = EncodedRange({(4, 32, 32): latents}, {(4, 32, 32): indices}, {}, {}, [], dict.fromkeys(indices, 7))
        write_part(tmp_path / f"{count}.safetensors", encoded, identity="")
        sizes.append((tmp_path / f"{count}.safetensors").stat().st_size)
    assert (sizes[1] - sizes[0]) / 800 == pytest.approx(need("dit-xl-2", images=1).store_bytes.low, abs=0.1)


def test_further_texts_are_counted():
    """HunyuanDiT: mT5's states with their padding, which its pooler reads, and CLIP's without."""
    found = need("hunyuandit-v1.2", images=1000)
    own, clip = 256 * 2048 * 2, 1024 * 2
    assert found.padded_text_bytes == own + 77 * clip
    assert (found.text_bytes.low, found.text_bytes.high) == (own + 49 * clip, own + 77 * clip)
    assert found.store_bytes.high == 1000 * (4 * 128 * 128 * 2 + own + 77 * clip + 72 + 24)
    assert found.notes[0] == (
        "padded to 256 × 2048 and 77 × 1024 (clip_text) in bf16, the text of each image takes 1.21 MB, and that of all "
        "1.21 GB; it is stored without padding but that of 256 × 2048: 1.15 MB to 1.21 MB each, with captions of 49 "
        "tokens (two or three sentences) to 77 (detailed ones) on the mean"
    )
    assert not any("data.part_size" in note for note in found.notes)


def test_llamas_layers_are_what_a_store_of_hidream_is_made_of():
    found = need("hidream-i1", images=1_000_000)
    layers, t5 = 32 * 128 * 4096 * 2, 128 * 4096 * 2
    assert layers == 33_554_432  # bytes a caption
    assert found.text_bytes.low == found.text_bytes.high == found.padded_text_bytes == layers + t5
    assert (
        "padded to 128 × 4096 and 4096 × 4096 (llama_text) in bf16, the text of each image takes 34.6 MB"
        in found.notes[0]
    )
    assert found.notes[1] == (
        "a worker of `bigdit extract` holds up to 3 parts in CPU memory: 27 GB with data.part_size 256, 1.69 GB with 16"
    )


def test_a_text_that_most_captions_lack_may_take_nothing():
    found = need("hunyuanimage-2.1", images=1)
    own, glyphs = 3584 * 2, 1472 * 2
    assert (found.text_bytes.low, found.text_bytes.high) == (49 * own, 168 * own + 128 * glyphs)


def test_padding_that_a_model_reads_is_stored():
    found = need("flux.1-dev", images=1000)
    assert found.text_bytes.low == found.text_bytes.high == found.padded_text_bytes == 512 * 4096 * 2
    assert found.notes[0].endswith("that of all 4.19 GB; it is stored so, since the model reads padding as well")


def test_first_frames_are_counted():
    plain, begun = (need(name, images=10) for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-480p"))
    assert begun.latent_bytes == 16 * 21 * 60 * 104 * 2
    more = begun.latent_bytes + 257 * 1280 * 2 + 8  # its latents, its embeddings, its digest
    beside = plain.store_bytes.low / 10 - plain.latent_bytes
    assert begun.store_bytes.low / 10 - begun.latent_bytes == beside + more
    assert any(note.startswith("the first frame of each video takes 4.85 MB more; the VAE") for note in begun.notes)


def test_references_are_counted():
    plain, edits = (need(name, images=10) for name in ("flux.1-dev", "flux.1-kontext-dev"))
    more = plain.latent_bytes + 8  # the latents of another image, and its digest
    assert edits.store_bytes.low / 10 == plain.store_bytes.low / 10 + more
    assert any(note.startswith("the image that each sample edits takes 524 kB more; ") for note in edits.notes)


def test_texts_with_an_image_are_counted_for_the_dropped_caption_too():
    edits = need("qwen-image-edit", images=10)
    assert edits.padded_text_bytes == (512 + 1408) * 3584 * 2
    note = f"the image that each sample edits takes {(524_288 + 2 * 1408 * 3584 * 2) / 1e6:.1f} MB more; "
    assert any(each.startswith(note) for each in edits.notes)


def test_masked_images_are_counted():
    plain, filled = (need(name, images=10) for name in ("flux.1-dev", "flux.1-fill-dev"))
    more = (16 + 64) * 128 * 128 * 2 + 8  # its latents, its mask by pixels, its digest
    assert filled.store_bytes.low / 10 == plain.store_bytes.low / 10 + more
    assert any(note.startswith("the masked image of each sample takes 2.62 MB more; ") for note in filled.notes)


def test_without_images_there_is_no_data_set():
    assert need("dit-xl-2") is None


def test_unknown_encoders_have_no_time():
    request = resolve_request("flux.2-klein-9b", "a100-80g-sxm", images=10)
    batch = catalog.batch_shape(request.model)
    assert encoding_requests(request) == {}
    found = dataset_need(request, batch, {})
    assert found.extraction_seconds is None
    assert (
        "how long extraction takes is not known: the catalogue has not all encoders of flux.2-klein-9b" in found.notes
    )


def test_an_old_gpu_encodes_in_what_it_computes():
    for gpu, precision in (("v100-32g-sxm2", "fp16"), ("a40", "bf16")):
        request = resolve_request("pixart-sigma-xl-2-512", gpu, images=10)
        requests = encoding_requests(request)
        assert {each.strategy.precision for each in requests.values()} == {precision}
        assert {each.part for each in requests.values()} == {"encoders"}


def test_extraction_takes_the_encoders_alone():
    """DiT's VAE: 16 images a pass, between its arithmetic at the GPU's rate and a hundred times that."""
    request = resolve_request("dit-s-8", "a100-80g-sxm", images=1_000_000)
    with EmulatedGpus(request.gpu, 1) as emulated:
        encoding = {size: emulated.attempt(each) for size, each in encoding_requests(request).items()}
    timeline = encoding[16].work
    (encode,) = [span for span, each in enumerate(timeline.spans) if each.phase == "images"]
    flops = sum(each.flops for each in timeline.operators if each.span == encode)
    fastest = flops / 16 / (request.gpu.tflops.fp32 * 1e12)
    one, many = (need("dit-s-8", encoding, images=1_000_000, gpus=gpus).extraction_seconds for gpus in (1, 8))
    assert 1e6 * fastest < one.low < one.high < 1e8 * fastest
    assert many.low == pytest.approx(one.low / 8)
    assert many.high == pytest.approx(one.high / 8)


def test_a_plan_says_where_encoders_have_no_room_together():
    """With made-up needs. The attempts that find them are extraction's, and tested there."""
    request = resolve_request("flux.1-dev", "rtx-3060-12g", images=1000)
    images = EncoderBytes(GIB, GIB, GIB)
    for gibs, printed in (
        (7, []),
        (
            10,
            [
                "text encoders and VAE do not fit the NVIDIA GeForce RTX 3060 together: a worker of `bigdit "
                "extract` has them take turns, and 10.00 GiB of weights wait in CPU memory"
            ],
        ),
        (
            12,
            [
                "extraction does not fit the NVIDIA GeForce RTX 3060: with a sample at a time 12.50 GiB of "
                "10.60 GiB are needed for the text encoders; a larger GPU, or encoders.device: cpu, encodes"
            ],
        ),
    ):
        assert _room_notes(EncodersNeed(images, EncoderBytes(gibs * GIB, GIB / 2, 0)), request) == printed


@given(st.floats(1, 1e18))
def test_sizes_on_disk_are_written_to_three_digits(nbytes):
    number, unit = on_disk(nbytes).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(nbytes, rel=6e-3, abs=0.5)


def test_a_machine_holds_all_of_its_processes():
    blocks = (Block(GIB, "parameter", ""), Block(3 * MIB, "input", "", pinned=True))
    timeline = Timeline(blocks, (1, 2, -1), (Span("init", 0, 3),))
    for cluster, processes in ((Cluster(), 1), (Cluster(gpus=4), 4), (Cluster(gpus=32), 8)):
        found = host_need(timeline, 5 * MIB, cluster)
        assert found.processes_per_node == processes
        assert found.process_bytes == GIB + 4 * MIB  # the pinned allocator takes the next power of two
        assert found.page_locked_bytes == 4 * MIB
        assert found.steps_bytes == 4 * MIB
        assert found.node_bytes == processes * (GIB + 4 * MIB + LIBRARIES_BYTES)
        saving = host_need(timeline, 2 * GIB, cluster).node_bytes  # by then the model has left CPU memory
        assert saving == processes * (2 * GIB + 4 * MIB + LIBRARIES_BYTES)


def test_the_libraries_take_no_more_than_is_allowed_for_them():
    """Without CUDA they take a sixth of the allowance. The rest is for the driver and its libraries."""
    code = (
        "import deepspeed, bigdit.engines.deepspeed, bigdit.optim, bigdit.train.loop\n"
        "from diffusers import SanaTransformer2DModel\n"
        "print([line for line in open('/proc/self/status') if line.startswith('VmRSS')][0].split()[1])"
    )
    done = run_command(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert LIBRARIES_BYTES / 12 < int(done.stdout.split()[-1]) * KIB < LIBRARIES_BYTES / 3
