"""Extract a folder of images in this process, and read the result."""

from commands import DIGITS
from stores import read_rows

from bigdit.catalog.resolve import model_spec
from bigdit.config.stages import load_run
from bigdit.store import FeatureStore

PART_SIZE = 4
BUCKETS = "data.buckets=[[128, 128], [128, 192]]"


def configured(images, features, *overrides):
    settings = [f"data.images={images}", f"data.features={features}", f"data.part_size={PART_SIZE}", BUCKETS]
    run = load_run(DIGITS, [*settings, *overrides])
    return run, model_spec(run.model)


def parts(folder):
    return {file.name: file.read_bytes() for file in folder.glob("part-*")}


def all_indices(folder):
    store = FeatureStore.open(folder)
    found = [read_rows(store, bucket, range(count))[2] for bucket, count in store.buckets.items()]
    return sorted(index for indices in found for index in indices)
