"""Tiny images, the files that hold them, and what a source finds there."""

import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bigdit.config.data import DataConfig
from bigdit.sources.open import open_source
from bigdit.sources.protocol import Unusable


def opened(images, features="features", buckets=((8, 8),), **more):
    """The source of a run whose `data.images` is `images`."""
    return open_source(DataConfig(images=images, features=features, buckets=buckets, **more))


def gradient(width=8, height=8, mode="RGB"):
    """An image in which each pixel differs from its neighbours."""
    rows, columns = np.mgrid[:height, :width]
    rgb = np.stack([rows * 7 % 256, columns * 11 % 256, (rows + columns) * 5 % 256], axis=-1)
    return Image.fromarray(rgb.astype(np.uint8)).convert(mode)


def save(path, caption="a caption", image=None, **options):
    """Save an image with a `.txt` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or gradient()).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def pixels(image):
    return np.asarray(image).tolist()


def png(number=0):
    """The bytes of a small gray image of one value."""
    buffer = io.BytesIO()
    gradient().convert("L").point(lambda _: number).save(buffer, "png")
    return buffer.getvalue()


def value(sample):
    return np.asarray(sample.image).flat[0]


def texts(item):
    """An item's captions with their weights, which it also gives without its images."""
    captions = item.load().captions
    assert item.captions() == captions
    return [(caption.text, caption.weight) for caption in captions]


def reason(item):
    with pytest.raises(Unusable) as error:
        item.load()
    return str(error.value)


def snapshot(folder, name, numbers, group=7):
    """Write Parquet as the hub does: images inside, in small row groups."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in numbers]
    table = pa.table({"image": images, "text": [f"number {number}" for number in numbers]})
    pq.write_table(table, folder / name, row_group_size=group)


def write_tar(path, files, tar_format=tarfile.PAX_FORMAT):
    """Write a tar of names and contents. A TarInfo is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(content) if isinstance(name, str) else member.size
            archive.addfile(member, io.BytesIO(content) if content is not None else None)
    return path


def damage(data, seed):
    """The bytes with a few of them flipped, overwritten or cut off."""
    random = np.random.default_rng(seed)
    damaged = bytearray(data)
    for _ in range(random.integers(1, 5)):
        at = int(random.integers(len(damaged)))
        how = random.integers(4)
        if how == 0:
            damaged[at] ^= 1 << int(random.integers(8))
        elif how == 1:
            damaged[at] = int(random.choice([0, 127, 128, 255]))
        elif how == 2:
            damaged[at : at + 4] = random.bytes(len(damaged[at : at + 4]))
        else:
            del damaged[max(at, 1) :]
    return bytes(damaged)
