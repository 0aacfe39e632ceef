"""Encoders that do not fit a GPU together take turns, and make the same features to the bit."""

import pytest
import torch
from gpus import answers

from bigdit.encoders.load import EncoderSide, Turns
from bigdit.errors import UserError

SCRIPT = """
import json
import torch
from bigdit.encoders.load import EncoderSide as Side, Turns
from bigdit.errors import UserError

GPU = torch.device("cuda", 0)

class Weights(torch.nn.Module):
    def __init__(self, gibs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(int(gibs * 2**30), dtype=torch.uint8), requires_grad=False)

class Encoder:
    def __init__(self, gibs):
        self.module = Weights(gibs).to(GPU)
    def modules(self):
        return [self.module]

def where(*sides):
    return [side.modules[0].weight.device.type for side in sides]

def error(ask):
    try:
        ask()
    except UserError as error:
        return error.problems

found, notes = {}, []
texts, images = Side("encoders.text", "a smaller one takes less"), Side("encoders.image", "tiling takes less")
turns = Turns(GPU, (texts, images), notes.append)
turns.load(texts, lambda: Encoder(5))
turns.load(images, lambda: Encoder(2))
found["together"] = where(texts, images), list(notes)
taken = turns.of(images)(lambda: torch.empty(8 * 2**30, dtype=torch.uint8, device=GPU).nbytes)
found["after images"] = taken, where(texts, images), list(notes)
turns.of(texts)(lambda: None)
found["after texts"] = where(texts, images), len(notes), torch.cuda.memory_allocated()
found["too much"] = error(lambda: turns.of(images)(lambda: torch.empty(10 * 2**30, dtype=torch.uint8, device=GPU)))
del turns, texts, images

notes.clear()
texts, images = Side("encoders.text", "a smaller one takes less"), Side("encoders.image", "tiling takes less")
turns = Turns(GPU, (texts, images), notes.append)
turns.load(texts, lambda: Encoder(7))
turns.load(images, lambda: Encoder(6))
found["loaded by turns"] = where(texts, images), len(notes)
del turns, texts, images
torch.cuda.empty_cache()
class Small(Encoder):
    def __init__(self, count, nbytes):
        self.module = torch.nn.Module()
        weights = [Weights(nbytes / 2**30).weight for _ in range(count)]
        self.module.weights = torch.nn.ParameterList(weights).to(GPU)

texts, images = Side("encoders.text", "a smaller one takes less"), Side("encoders.image", "tiling takes less")
turns = Turns(GPU, (texts, images), notes.append)
turns.load(texts, lambda: Small(256, 62 * 1024))
turns.load(images, lambda: Small(448, 36 * 1024))
larger = [torch.empty(2**33, dtype=torch.uint8, device=GPU)]
def once_short():
    if larger:
        larger.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
turns.of(images)(once_short)
found["of small weights"] = [images.nbytes, torch.cuda.memory_reserved()]
del turns, texts, images

lone = Side("encoders.text", "a smaller one takes less")
found["not loaded"] = error(lambda: Turns(GPU, (lone,), notes.append).load(lone, lambda: Encoder(13)))

from bigdit.encoders.load import load_encoders
from bigdit.config.data import EncodersConfig
config = EncodersConfig.model_validate(json.loads('CONFIG'))
pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
def features(encoders):
    latents = encoders.of_images(lambda: encoders.image.encode(pixels)).cpu()
    (text,) = encoders.text.encode(["a caption"])
    return latents, text.states
together = features(load_encoders(config, note=notes.append))
notes.clear()
apart = load_encoders(config, note=notes.append)
held = [torch.empty(2**30, dtype=torch.uint8, device=GPU)]
def short():
    if held:
        held.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
apart.of_images(short)
by_turns = [features(apart) for _ in range(2)]
found["same"] = [all(map(torch.equal, together, each)) for each in by_turns]
found["values"] = [float(each.abs().sum()) for each in together]
found["noted"] = len(notes)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(once):
    from tiny_vaes import kl

    folder = once("tiny-vae", lambda folder: kl().save_pretrained(folder / "vae"))
    config = (
        '{"image": {"name": "vae", "class_name": "AutoencoderKL", "path": "%s"}, "device": "cuda", "text": '
        '{"config": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}, "max_tokens": 7}}'
    )
    return answers("rtx-3060-12g", SCRIPT.replace("CONFIG", config % (folder / "vae")))


def test_all_stay_while_there_is_room(found):
    assert found["together"] == [["cuda", "cuda"], []]


def test_they_take_turns_from_where_memory_runs_out(found):
    taken, where, notes = found["after images"]
    assert (taken, where) == (8 * 2**30, ["cpu", "cuda"])
    (note,) = notes
    assert note.startswith("note: text encoders and VAE do not fit on the GPU together, and take turns")
    assert note.endswith("up to 5.00 GiB of weights wait in CPU memory")
    assert found["after texts"] == [["cuda", "cpu"], 1, 5 * 2**30]
    assert found["loaded by turns"] == [["cpu", "cuda"], 1]


def test_weights_that_lay_between_the_others_leave_their_segments(found):
    weights, reserved = found["of small weights"]
    assert weights == 448 * 36 * 1024
    assert weights <= reserved <= weights + 2 * 2**20  # torch's segments for small tensors are 2 MiB


def test_what_has_no_room_alone_is_a_line(found):
    (line,) = found["too much"]
    assert line.startswith("encoders.image ran out of memory: 10.00 GiB were asked for, ")
    assert line.endswith("; tiling takes less")
    (line,) = found["not loaded"]
    assert line.startswith("encoders.text ran out of memory: 13.00 GiB were asked for, ")


def test_features_are_the_same_to_the_bit(found):
    assert found["noted"] == 1
    assert min(found["values"]) > 0
    assert found["same"] == [True, True]


def test_a_host_that_runs_out_has_no_turns():
    notes = []
    sides = EncoderSide("encoders.text", "bf16 takes half"), EncoderSide("encoders.image", "")
    sides[1].modules.append(torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"^encoders\.text ran out of memory: .* were free; bf16 takes half$"):
        Turns(torch.device("cpu"), sides, notes.append).of(sides[0])(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert notes == []


class Unmovable(torch.nn.Linear):
    """Weights that wait in CPU memory that has no room for them."""

    def to(self, device):
        return torch.empty(2**60, dtype=torch.uint8, device=device)


def test_a_host_without_room_for_those_that_wait_is_a_line():
    notes, short = [], [True]
    sides = EncoderSide("encoders.text", "bf16 takes half"), EncoderSide("encoders.image", "tiling takes less")
    sides[0].modules.append(Unmovable(1, 1))

    def ask():
        if short.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    line = (
        r"^encoders\.text that waits for its turn in CPU memory ran out of memory: 1073741824\.00 GiB were asked for, "
        r".* were free; use fewer workers$"
    )
    with pytest.raises(UserError, match=line):
        Turns(torch.device("meta"), sides, notes.append).of(sides[1])(ask)
    assert (len(notes), short) == (1, [])
