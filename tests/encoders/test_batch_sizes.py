"""How many samples are encoded at once, what is encoded only once, and the precision of 8-bit storage."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigdit.config.data import EncodersConfig
from bigdit.encoders.load import TextCache, encoding_device, load_encoders
from bigdit.encoders.protocol import CPU_BATCH, BatchSize, encode_by_length
from bigdit.errors import UserError
from bigdit.store.text import Text, dequantise, quantise


class Memory:
    """An encoder that doubles numbers, and runs out of memory above `room` of them."""

    def __init__(self, room, fail):
        self.room, self.fail, self.batches = room, fail, []

    def __call__(self, batch):
        self.batches.append(len(batch))
        if len(batch) > self.room:
            self.fail()
        return [2 * number for number in batch]


def cuda_fails():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def host_fails():
    torch.empty(2**60, dtype=torch.uint8)  # more than any machine has: a real failure of torch's allocator


@pytest.mark.parametrize("fail", [cuda_fails, host_fails])
def test_batches_are_halved_where_memory_runs_out(fail):
    size, encode = BatchSize(16), Memory(5, fail)
    assert size.map(encode, range(30)) == [2 * number for number in range(30)]
    assert encode.batches[:4] == [16, 8, 4, 4]
    assert size.size == 4


def test_batches_grow_again_and_what_fails_is_tried_less_and_less():
    size, encode = BatchSize(8), Memory(4, cuda_fails)
    size.map(encode, range(4 * 200))
    failed = [place for place, count in enumerate(encode.batches) if count == 8]
    waits = [later - earlier for earlier, later in itertools.pairwise(failed)]
    assert waits == sorted(waits)
    assert waits[:3] == [17, 33, 65]
    encode.room = 8
    encode.batches.clear()
    size.map(encode, range(4 * 400))
    assert encode.batches[-1] == 8
    assert size.size == 8


def test_what_does_not_fit_alone_is_an_error_of_the_user():
    with pytest.raises(UserError, match=r"encoders\.batch_size: memory does not suffice for one sample at a time"):
        BatchSize(4).map(Memory(0, host_fails), range(3))


def test_other_errors_are_not_taken_for_memory():
    def broken(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        BatchSize(4).map(broken, range(3))


@given(st.lists(st.text(max_size=12), max_size=40), st.integers(1, 9), st.integers(1, 9))
def test_texts_come_in_the_order_of_their_captions(captions, most, room):
    batches = []

    def encode(places):
        if len(places) > room:
            cuda_fails()
        batches.append([len(captions[place]) for place in places])
        return [Text(torch.tensor([[float(place)]])) for place in places]

    texts = encode_by_length(captions, [len(caption) for caption in captions], BatchSize(most), encode)
    assert [int(text.states) for text in texts] == list(range(len(captions)))
    lengths = [length for batch in batches for length in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_texts_are_kept_before_the_next_are_encoded():
    done = []

    def encode(places):
        done.append(f"{len(places)} encoded")
        return [Text(torch.zeros(1, 1)) for _ in places]

    encode_by_length(["a", "b", "c"], [1, 1, 1], BatchSize(2), encode, lambda text: done.append("kept") or text)
    assert done == ["2 encoded", "kept", "kept", "1 encoded", "kept"]


class Counting:
    """A text encoder that records its calls: four tokens a caption."""

    dim, pooled_dim, max_tokens, streams, identity = 8, 2, 4, {"more": (3, 5)}, {"name": "counting"}

    def __init__(self):
        self.asked = []

    def encode(self, captions, kept):
        self.asked.append(list(captions))
        return [kept(Text(torch.full((4, 8), float(len(caption))), torch.ones(2))) for caption in captions]

    def null(self):
        return Text(torch.zeros(4, 8))


def test_a_repeated_caption_is_encoded_once():
    encoder = Counting()
    cache = TextCache(encoder)
    first = cache.encode(["a", "bb", "a", "bb"])
    second = cache.encode(["ccc", "a"])
    assert encoder.asked == [["a", "bb"], ["ccc"]]
    assert [float(text.states[0, 0]) for text in first + second] == [1, 2, 1, 2, 3, 1]
    assert second[1].states.dtype == second[1].pooled.dtype == cache.null().states.dtype == torch.bfloat16
    assert first[0].states is second[1].states
    assert (cache.dim, cache.pooled_dim, cache.max_tokens, cache.identity) == (8, 2, 4, encoder.identity)
    assert cache.streams == {"more": (3, 5)}
    assert cache.encode([]) == []


def test_the_cache_is_bounded_in_bytes_and_lets_the_longest_unused_go():
    encoder = Counting()
    text_bytes = (4 * 8 + 2) * 2
    cache = TextCache(encoder, capacity_bytes=2 * text_bytes)
    for caption in ("a", "b", "a", "c"):  # at the last one, b goes
        cache.encode([caption])
    assert cache.nbytes == 2 * text_bytes
    cache.encode(["a", "c"])
    assert encoder.asked == [["a"], ["b"], ["c"]]
    cache.encode(["b"])
    assert encoder.asked[-1] == ["b"]
    assert len(cache.encode(list("defgh"))) == 5  # more than it keeps are still returned
    assert cache.nbytes == 2 * text_bytes


def rows(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 100.0, 1e30])
def test_eight_bits_keep_the_values_within_their_spacing(scale):
    states = rows(50, 512, scale=scale)
    values, per_token = quantise(states)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, states.shape)
    assert (per_token.dtype, per_token.shape) == (torch.float32, (50,))
    back = dequantise(values, per_token, torch.float32)
    error = (back - states).abs()
    # Half of the spacing: 2⁻⁴ of a normal value, and 2⁻¹⁰ of the scale where e4m3 is subnormal.
    assert (error <= torch.maximum(states.abs() * 2**-4, per_token[:, None] * 2**-10) * (1 + 1e-5)).all()
    relative = error.double().norm() / states.double().norm()
    assert 0.022 < relative < 0.030  # measured 0.026 on normal values


def test_a_token_with_one_huge_feature_keeps_its_own_scale_and_no_other():
    states = rows(3, 2304)
    states[1, 7] = 2000.0  # like those of T5 and Gemma
    back = dequantise(*quantise(states), torch.float32)
    error = (back - states).square().sum(1).sqrt() / states.square().sum(1).sqrt()
    assert error[1] < 0.03
    assert torch.equal(back[[0, 2]], dequantise(*quantise(states[[0, 2]]), torch.float32))


def test_zeros_stay_zeros_and_bf16_is_what_comes_back():
    states = torch.zeros(2, 16, dtype=torch.bfloat16)
    values, per_token = quantise(states)
    assert torch.equal(dequantise(values, per_token), states)
    assert torch.equal(dequantise(*quantise(torch.zeros(0, 16))), torch.zeros(0, 16, dtype=torch.bfloat16))


def test_the_encoders_of_a_run_are_loaded_together():
    text = {"config": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}, "max_tokens": 7}
    run = EncodersConfig.model_validate({"image": {"name": "identity"}, "text": text, "device": "cpu", "batch_size": 3})
    encoders = load_encoders(run)
    assert (encoders.image.batch_size, encoders.device) == (3, torch.device("cpu"))
    assert load_encoders(run.model_copy(update={"batch_size": "auto"})).image.batch_size == CPU_BATCH
    first, again = (encoders.text.encode(["a cat"])[0] for _ in range(2))
    assert first.states.dtype == torch.bfloat16
    assert first is again


def test_on_a_cpu_a_caption_has_the_same_bytes_in_any_company():
    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 8}
    text = {"config": sizes, "max_tokens": 64}
    run = EncodersConfig.model_validate({"image": {"name": "identity"}, "text": text, "device": "cpu"})
    captions = [f"caption {'x' * (7 * i % 40)} of {i}" for i in range(20)]
    together = load_encoders(run).text.encode(captions)
    reversed_halves = load_encoders(run).text
    again = [*reversed_halves.encode(captions[:9:-1]), *reversed_halves.encode(captions[9::-1])][::-1]
    for one, two in zip(together, again, strict=True):
        assert torch.equal(one.states, two.states)


def test_devices_are_taken_interleaved_or_refused(monkeypatch):
    assert encoding_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # on a machine without one
    assert encoding_device("auto", 3) == torch.device("cpu")
    with pytest.raises(UserError, match=r"encoders\.device is cuda, and torch finds no GPU here"):
        encoding_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # there is no GPU: only its number is known
    assert [encoding_device("auto", worker).index for worker in range(6)] == [0, 1, 2, 3, 0, 1]
