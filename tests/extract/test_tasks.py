"""The same extraction as a SLURM array and on a Ray cluster: the same parts, and a line for what goes wrong."""

import os
import shutil
from dataclasses import replace

import pytest
from commands import DIGITS, bigdit, with_set

from bigdit.catalog.resolve import model_spec
from bigdit.config.data import SourceConfig
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.extract.tasks import Ray, Slurm, _Task
from bigdit.store import FeatureStore

PARTS = 12


def configured(images, features, *more):
    run = load_run(DIGITS, [f"data.images={images}", f"data.features={features}", "data.part_size=20", *more])
    return run, model_spec(run.model)


@pytest.fixture(scope="module")
def here(images, tmp_path_factory):
    """The parts that this machine's processes make."""
    folder = tmp_path_factory.mktemp("here") / "features"
    extract(*configured(images, folder), workers=1)
    return parts(folder)


def parts(folder):
    return {file.name: file.read_bytes() for file in folder.glob("part-*")}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_array_makes_the_same_parts(images, here, tmp_path):
    """submitit's local executor starts the tasks as processes of this machine, as SLURM would."""
    folder, copy = tmp_path / "f", tmp_path / "copy"
    shutil.copytree(images, copy)
    settings = with_set([f"data.images={copy}", f"data.features={folder}", "data.part_size=20"])
    options = ["--engine", "slurm", "--tasks", "2", "--workers", "1", "--resource", "cluster=local"]
    done = bigdit("extract", "--config", DIGITS, *settings, *options)
    assert done.returncode == 0, done.stderr
    assert f"{folder}: 240 of 240 images encoded" in done.stdout
    assert f"logs: {folder}/slurm" in done.stderr
    assert parts(folder) == here
    assert len(list((folder / "speed").iterdir())) <= 2
    assert list((folder / "workers").iterdir()) == []
    assert len(FeatureStore.open(folder).schema.ranges()) == PARTS
    again = extract(*configured(copy, folder), engine=Slurm(2, {"cluster": "local"}))
    assert (again.parts, again.workers) == (0, [])
    next(copy.rglob("*.txt")).write_text("another caption")
    grown = extract(*configured(copy, folder), engine=Slurm(2, {"cluster": "local"}))
    assert (grown.parts, grown.images, grown.store.gone, grown.store.encoded) == (1, 1, 1, 240)
    assert here.items() < parts(folder).items()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_task_that_fails_is_one_line(images, tmp_path):
    """The images change between submission and start."""

    def changed(job, source):
        data = job.data.model_copy(update={"images": (SourceConfig(path=tmp_path / "none"),)})
        Slurm(1, {"cluster": "local"})(replace(job, data=data), source)

    with pytest.raises(UserError) as error:
        extract(*configured(images, tmp_path / "f"), engine=changed)
    (problem,) = error.value.problems
    assert problem.startswith("1 of 1 task failed, the first: ")
    assert "none does not exist" in problem
    assert f"log: {tmp_path}/f/slurm/" in problem
    assert problem.endswith("resumes from the finished parts")


def test_an_interrupted_task_is_queued_again_as_it_is():
    task = _Task(None)
    assert task.checkpoint().function is task


def test_what_an_engine_lacks_is_reported_before_encoding(images, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--engine slurm: sbatch was not found on this machine; run this on a SLURM"):
        extract(*configured(images, tmp_path / "f"), engine=Slurm(1, {}))
    with pytest.raises(UserError, match=r"--resource: submitit rejects it: .*partiton"):
        extract(*configured(images, tmp_path / "f"), engine=Slurm(1, {"cluster": "local", "partiton": "gpu"}))
    with pytest.raises(UserError, match="cluster=lsf is neither slurm nor local"):
        extract(*configured(images, tmp_path / "f"), engine=Slurm(1, {"cluster": "lsf"}))
    with pytest.raises(UserError, match=r"--resource: a Ray task has no option num_gpu; did you mean num_gpus"):
        extract(*configured(images, tmp_path / "f"), engine=Ray(1, {"num_gpu": 1}))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_makes_the_same_parts(images, here, tmp_path, monkeypatch):
    """A real cluster on this machine alone, which ray starts and ends."""
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    report = extract(*configured(images, tmp_path / "f"), workers=1, engine=Ray(1, {}))
    assert parts(tmp_path / "f") == here
    assert sum(worker.parts for worker in report.workers) >= PARTS
    pids = {int(worker.worker.rsplit("_", 5)[3]) for worker in report.workers}
    assert os.getpid() not in pids
    assert list((tmp_path / "f/workers").iterdir()) == []
