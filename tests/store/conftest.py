"""A small store of real images, encoded here, and its inputs."""

import numpy as np
import pytest
import torch
from PIL import Image

from bigdit.config.data import IdentityCodec, SourceConfig, TextEncoderConfig
from bigdit.encoders.load import Encoders, load_image_codec
from bigdit.encoders.t5 import T5TextEncoder
from bigdit.extract.worker import UnitEncoder
from bigdit.sources.folder import ImageFolder
from bigdit.store.part import part_path, write_part
from bigdit.store.report import Stopwatch
from bigdit.store.schema import StoreSchema, claim, part_identity, store_identity
from bigdit.store.store import write_null_text

BUCKETS = [(8, 8), (8, 12)]
COUNT, PART_SIZE = 11, 4
BAD = 5  # this image has no caption


@pytest.fixture(scope="module")
def codec():
    return load_image_codec(IdentityCodec(factor=2, color="gray"))


@pytest.fixture(scope="module")
def text_encoder():
    config = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5TextEncoder(TextEncoderConfig(config=config, max_tokens=20))


@pytest.fixture
def images(tmp_path):
    """Eleven images of noise with two aspect ratios. Captions repeat, and number 5 has none."""
    folder = tmp_path / "images"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for i in range(COUNT):
        width = 12 if i % 3 == 0 else 8
        Image.fromarray(noise.integers(0, 256, (8, width), dtype=np.uint8)).save(folder / f"{i:02d}.png")
        if i != BAD:
            (folder / f"{i:02d}.txt").write_text(f"number {i % 2}")
    return folder


@pytest.fixture
def schema(images, codec, text_encoder):
    return StoreSchema(
        codec=codec.identity,
        text_encoder=text_encoder.identity,
        buckets=BUCKETS,
        sources=[ImageFolder(SourceConfig(path=images)).identity],
        part_size=PART_SIZE,
    )


@pytest.fixture
def fill(images, codec, text_encoder):
    """Make a whole store of the images by its schema."""

    def make(root, schema):
        claim(root, schema)
        write_null_text(root, text_encoder.null, store_identity(schema))
        for start, end in schema.ranges():
            items = ImageFolder(SourceConfig(path=images)).items(start, end)
            encoding = UnitEncoder(Encoders(codec, text_encoder, torch.device("cpu")), schema, Stopwatch())
            list(encoding.encode(items))
            write_part(part_path(root, start, end), encoding.encoded(), identity=part_identity(schema, start))

    return make


@pytest.fixture
def root(tmp_path, schema, fill):
    """A whole store."""
    fill(tmp_path / "store", schema)
    return tmp_path / "store"
