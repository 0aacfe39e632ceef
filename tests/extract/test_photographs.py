"""Photographs with real aspect ratios, from scikit-image: each goes into its own bucket, upright, in its colours, and
cropped as little as possible."""

import json

import numpy as np
import pytest
import skimage.data
from commands import DIGITS, in_process, with_set
from PIL import Image
from skimage.transform import resize
from stores import read_rows
from torch.nn.functional import pixel_shuffle

from bigdit.store import FeatureStore

BUCKETS = {
    (64, 64): ("astronaut", "retina", "immunohistochemistry", "moon", "camera"),
    (56, 64): ("hubble_deep_field",),
    (56, 72): ("coins",),
    (48, 72): ("chelsea", "coffee", "rocket"),
    (40, 80): ("page",),
}
MOST_CUT = 0.03
NEAR = 0.03
"""Mean difference between two kinds of resampling, as a share of full scale. A photograph upside down differs three
times as much."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for name in (name for names in BUCKETS.values() for name in names):
        Image.fromarray(getattr(skimage.data, name)()).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a photograph: {name}")
    return folder


@pytest.fixture(scope="module")
def stored(photographs, tmp_path_factory):
    """By name, the pixels [H, W, 3] in [0, 1] behind the store's latents."""
    root = tmp_path_factory.mktemp("store") / "features"
    chosen = [f"data.images={photographs}", f"data.features={root}", f"data.buckets={[[*each] for each in BUCKETS]}"]
    chosen += ["encoders.image.color=rgb", "model.kwargs.in_channels=12", "model.kwargs.out_channels=12"]
    done = in_process("extract", "--config", DIGITS, *with_set([*chosen, "data.workers=1"]), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["store"]["skipped"] == []
    names = sorted(name for names in BUCKETS.values() for name in names)
    found = {}
    store = FeatureStore.open(root)
    for bucket, count in store.buckets.items():
        latents, _, indices = read_rows(store, bucket, range(count))
        for index, sample in zip(indices, pixel_shuffle(latents.float(), 2), strict=True):
            found[names[index]] = (sample.permute(1, 2, 0).numpy() + 1) / 2
    return found


def cut(photograph, height, width):
    """Its middle, with the bucket's ratio of sides."""
    most = min(photograph.shape[0] / height, photograph.shape[1] / width)
    rows, columns = round(most * height), round(most * width)
    top, left = (photograph.shape[0] - rows) // 2, (photograph.shape[1] - columns) // 2
    return photograph[top : top + rows, left : left + columns]


@pytest.mark.parametrize(("bucket", "name"), [(bucket, name) for bucket, names in BUCKETS.items() for name in names])
def test_a_photograph_is_in_its_bucket_as_it_is(stored, bucket, name):
    photograph = np.asarray(Image.fromarray(getattr(skimage.data, name)()).convert("RGB"))
    assert stored[name].shape == (*bucket, 3)
    kept = cut(photograph, *bucket)
    assert kept.size >= (1 - MOST_CUT) * photograph.size
    expected = resize(kept, (*bucket, 3), anti_aliasing=True)
    assert np.abs(stored[name] - expected).mean() < NEAR
    assert np.abs(stored[name] - expected[::-1, ::-1]).mean() > 3 * np.abs(stored[name] - expected).mean()
