"""The jobs of launch/slurm on a real SLURM with two machines: disturbed runs equal an undisturbed one to the bit."""

import getpass
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import BIN, DIGITS, with_set
from disturbing import rows_of, weights_of
from running import FSDP2, LIMIT_S, ZERO2, arguments, ended, until
from slurm import GPUS, NODES, Job, cluster, unpack

from bigdit import catalog
from bigdit.catalog.resolve import model_spec
from bigdit.config.stages import load_run
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_python
from bigdit.extract.extract import extract

pytestmark = pytest.mark.slow

STEPS = ("train.steps=60", "train.checkpoint_every=15")
TRAIN = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "launch/slurm/train.sbatch")


@pytest.fixture(scope="module")
def slurm(once, tmp_path_factory):
    with cluster(once("slurm", unpack), tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_job_is_left(slurm):
    yield
    slurm.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
    slurm.run("scancel", "--user", getpass.getuser())
    until(lambda: not slurm.run("squeue", "-h"), within=60)


def written(output):
    """A run's steps and its exported weights."""
    return rows_of(output), {name: weight.tobytes() for name, weight in weights_of(output).items()}


def training(slurm, features, output, *overrides, options=()):
    _, *words = arguments(features, output, *STEPS, *overrides)
    return slurm.submit(output, *options, *TRAIN, *words)


def send(signum, pids):
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.timeout(1200)
def test_a_job_resumes_whatever_ends_it(slurm, features, tmp_path):
    """Its time limit, until a machine that was drained meanwhile is back; then the loss of a machine; then a more
    urgent job."""
    output = tmp_path / "run"
    run = training(slurm, features, output, *FSDP2, options=("--time=60", "--signal=USR1@90"))
    send(signal.SIGSTOP, run.until_it_trains().ranks())  # SLURM looks at limits each 30 s; its signal wakes them
    undisturbed = training(slurm, features, tmp_path / "undisturbed", *FSDP2).until_it_trains()
    run.process.update(f"TimeLimit={run.process.minutes() + 2}")
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=repair")
    assert undisturbed.ends(within=LIMIT_S) == 0, undisturbed.stderr
    until(lambda: "SIGUSR1: saved" in run.stderr)
    run.process.update("TimeLimit=60")
    until(lambda: run.process.shows()["JobState"] == "PENDING")
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    ranks = run.until_it_trains().ranks()
    (step,) = re.findall(r"SIGUSR1: saved \S+/step-(\d+); ", run.stderr)
    assert f"step {int(step)}" in run.stderr.partition("resuming from")[2]
    assert run.stderr.count(f"wrote {output}/report.html\n") == 1

    send(signal.SIGSTOP, ranks)  # it hangs, like processes whose peer is gone
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=lost")
    until(lambda: ended(ranks))
    slurm.run("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    send(signal.SIGSTOP, run.until_it_trains().ranks())  # SLURM's signal wakes them
    before = run.stderr
    assert " ".join(before.split()).count(f"resuming from {output}/checkpoints/step-") == 2

    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert run.ends(within=LIMIT_S) == 0, run.stderr
    assert run.process.restarts() == 3
    after = run.stderr.removeprefix(before)
    assert after.count("SIGTERM: saved ") == 1
    assert after.count(f"wrote {output}/report.html\n") == 2
    assert written(output) == written(tmp_path / "undisturbed")


def test_a_second_job_on_an_output_is_refused_and_the_first_ends_when_it_is_cancelled(slurm, features, tmp_path):
    output = tmp_path / "run"
    run = training(slurm, features, output, *ZERO2, "train.steps=1000000")
    ranks = run.until_it_trains().ranks()
    send(signal.SIGSTOP, ranks)  # it leaves its cores to the other job
    second = training(slurm, features, output, *ZERO2, options=("--output", tmp_path / "second.log"))
    assert second.ends(within=LIMIT_S)  # 1, or 143 for a task that srun ended for it
    printed = (tmp_path / "second.log").read_text()
    assert printed.count(f"error: output {output} is in use by process {ranks[0]} on ") == 1, printed
    assert second.process.restarts() == 0
    send(signal.SIGCONT, ranks)
    slurm.run("scancel", run.process.name)
    run.ends()
    until(lambda: ended(ranks))
    assert run.process.shows()["JobState"] == "CANCELLED"
    assert run.process.restarts() == 0
    assert run.stderr.count(f"SIGTERM: saved {output}/checkpoints/step-{run.saved()[-1]:08d}; ") == 1


def test_an_array_encodes_what_one_machine_does_though_a_task_is_lost(slurm, images, tmp_path):
    """One of its tasks is requeued while it encodes."""
    settings = [f"data.images={images}", "data.part_size=20"]
    right = load_run(DIGITS, [*settings, f"data.features={tmp_path}/right"])
    extract(right, model_spec(right.model), workers=1)
    store = tmp_path / "run"
    words = ("--array=1-2", "--cpus-per-task=1", "launch/slurm/extract.sbatch", DIGITS)
    array = slurm.submit(store, *words, *with_set([*settings, f"data.features={store}"]))
    until(lambda: list(store.glob("workers/*")))
    slurm.run("scontrol", "requeue", f"{array.process.name}_1")
    for task in (f"{array.process.name}_{number}" for number in (1, 2)):
        assert Job(slurm, task).wait(LIMIT_S) == 0, array.stderr
    made, wanted = (
        {file.name: file.read_bytes() for file in each.glob("part-*")} for each in (store, tmp_path / "right")
    )
    assert made == wanted


def test_an_emulated_command_may_be_slurm_s(slurm, tmp_path):
    """Each machine's tasks have that machine's GPUs, which the job's environment names. Two jobs run beside each
    other: sbatch looks for its job's end every few seconds."""
    uses = "import torch; torch.ones(1 << 20, device='cuda').sum().item()"
    emulate = (BIN / "bigdit", "emulate", "--gpu=a40", "--nodes=2", "--json", "--")
    jobs = (
        ("sbatch", "--nodes=2", "--wait", f"--output={tmp_path}/log", f'--wrap=srun {cuda_python()} -c "{uses}"'),
        ("salloc", "--nodes=2", "srun", cuda_python(), "-c", uses),
    )
    with ThreadPoolExecutor(len(jobs)) as aside:
        reports = [json.loads(each) for each in aside.map(lambda job: slurm.run(*emulate, *job), jobs)]
    for report in reports:
        accounts = report["runs"][0]["accounts"]
        assert [(each["node"], each["rank"], each["world_size"]) for each in accounts] == [(0, 0, 2), (1, 1, 2)]
        assert not any("shared its memory" in notice for notice in report["notices"])


def test_emulated_gpus_are_allocated(slurm):
    """Two tasks on a machine of two GPUs have one each. A third GPU is refused."""
    environment = slurm.environment | emulated_environment(catalog.gpu("a40"), len(GPUS))
    asks = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    words = ("--nodes=1", "--ntasks=2", "--gpus-per-task=1", cuda_python(), "-c", asks)
    seen = slurm.run("srun", *words, environment=environment).splitlines()
    assert [line.split()[0] for line in seen] == ["1", "1"]
    assert len({*seen}) == 2
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm.run("sbatch", "--nodes=1", "--gpus-per-node=3", "--wrap=true")
