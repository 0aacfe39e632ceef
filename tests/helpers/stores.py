"""Caches of random features, made without images or encoders, and streams of batches from them."""

from contextlib import closing
from dataclasses import replace

import torch

from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.sources.protocol import Caption
from bigdit.store.part import EncodedRange, part_path, write_part
from bigdit.store.reader import Part
from bigdit.store.schema import FILE, Change, StoreSchema, part_identity, schema_text, store_identity
from bigdit.store.store import write_null_text
from bigdit.store.text import Text

SHAPES = [(4, 6, 6), (4, 4, 8)]
DIM, TOKENS, POOLED, PART = 16, 12, 6, 8
STREAMS = {"layers": {"max_tokens": 3, "dim": 10}, "glyphs": {"max_tokens": 5, "dim": 4}}
NULL = Text(torch.full((2, DIM), 7.0), torch.full((POOLED,), 9.0))


def make_store(
    root,
    count=40,
    *,
    deviation=False,
    pooled=False,
    eight_bits=False,
    dtype=torch.bfloat16,
    several=False,
    buckets=((8, 8),),
    classes=None,
    streams=False,
    gone=(),
    shapes=None,
):
    """Write random features. The second caption of sample i weighs three times its first.

    With `classes` there are no captions, and sample i has the class i modulo their number. With `streams` a text has
    two more arrays, one of which may be empty; its mask shows the first half of its states. With runs `gone`, samples
    from 40 on were added later. A third of the samples has the second of two `shapes`, by default SHAPES; more than
    two shapes are equally frequent.
    """
    shapes = shapes or SHAPES
    schema = StoreSchema(
        codec={},
        text_encoder={} if classes else {"max_tokens": TOKENS} | ({"streams": STREAMS} if streams else {}),
        buckets=list(buckets),
        sources=[{"kind": "random", "count": count}],
        part_size=PART,
        classes=classes,
    )
    if gone:
        base, added = {"kind": "random", "count": 40}, {"kind": "added", "count": count - 40, "of": 0}
        sources = [base, added] if count > 40 else [base]
        change = Change(sources=[base], gone=list(gone))
        schema = schema.model_copy(update={"sources": sources, "changes": [change]})
    root.mkdir(exist_ok=True)
    (root / FILE).write_text(schema_text(schema))
    if not classes:
        null = NULL if pooled else Text(NULL.states)
        write_null_text(root, lambda: null_of_streams(null) if streams else null, store_identity(schema))
    truth = {}
    for start, end in schema.ranges():
        generator = torch.Generator().manual_seed(start)
        latents, indices, captions, texts = {}, {}, {}, {}
        for number, shape in enumerate(shapes):
            of = {
                index: int(index % 3 == 0) if len(shapes) == 2 else index % len(shapes) for index in range(start, end)
            }
            chosen = indices[shape] = [index for index in of if of[index] == number]
            size = (len(chosen), 2, *shape) if deviation else (len(chosen), *shape)
            latents[shape] = torch.randn(size, generator=generator).abs().to(dtype)
        labels = {index: index % classes for index in range(start, end)} if classes else None
        for index in range(start, end) if labels is None else ():
            names = [f"{index}a", f"{index}b"] if several else [f"{index % 5}"]
            captions[index] = tuple(Caption(name, 1.0 + 2.0 * i) for i, name in enumerate(names))
            for name in names:
                length = 1 + (index + len(texts)) % TOKENS
                vector = torch.randn(POOLED, generator=generator) if pooled else None
                text = Text(torch.randn(length, DIM, generator=generator), vector)
                texts.setdefault(name, streamed(text, index, generator) if streams else text)
        for shape, chosen in indices.items():
            for sample, index in zip(latents[shape], chosen, strict=True):
                truth[index] = (sample, [texts[caption.text] for caption in captions.get(index, ())])
        encoded = EncodedRange(latents, indices, captions, texts, [], labels)
        write_part(part_path(root, start, end), encoded, identity=part_identity(schema, start), eight_bits=eight_bits)
    return truth


def streamed(text, index, generator):
    """A text with streams: all layers, whose mask hides one, and 0 to 5 glyphs."""
    more = {
        "layers": Text(torch.randn(3, 10, generator=generator), unmasked=2),
        "glyphs": Text(torch.randn(index % 6, 4, generator=generator)),
    }
    return replace(text, unmasked=len(text.states) // 2, streams=more)


def null_of_streams(text):
    """The empty caption with the same streams."""
    return replace(
        text, unmasked=1, streams={"layers": Text(torch.full((3, 10), 8.0)), "glyphs": Text(torch.zeros(0, 4))}
    )


def read_rows(store, bucket, positions):
    """Latents as stored, texts of first captions, and source indices of samples of a bucket, in source order."""
    ends = store.index.counts[:, store.index.shapes.index(bucket)].cumsum()
    latents, texts, indices = [], [], []
    for position in positions:
        number = int((ends <= position).sum())
        part, row = store.part(number), int(position - (ends[number - 1] if number else 0))
        index, sample = part.latents(bucket, row)
        latents.append(sample)
        indices.append(index)
        if store.classes is None:
            texts.append(part.text(part.choose_caption(bucket, row, 0.0)))
    return torch.stack(latents), texts, indices


def damages(path):
    """What is wrong with a part: its damaged rows, or why it is refused."""
    try:
        return list(Part.open(path).damages())
    except UserError as error:
        return [str(error)]


def stream_of(store, micro=4, accum=1, world=None, **options):
    world = world or World()
    order = Order(store.index.counts, store.index.shapes, micro * accum * world.world_size, seed=0)
    options = {"caption_dropout": 0.0, "seed": 0} | options
    return FeatureStream(store, world, order, micro_batch_size=micro, grad_accum_steps=accum, **options)


def read_all(store, steps, **options):
    with closing(stream_of(store, **options).steps(0, steps)) as found:
        return [batch for step in found for batch in step]
