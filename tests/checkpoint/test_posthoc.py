"""EMAs of other widths, made from snapshots of those that were kept (arXiv:2312.02696, §3.2, appendix C)."""

import itertools
import shutil
import signal

import numpy as np
import pytest
import torch
from commands import HELPERS, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training import exported, run, run_to

from bigdit import checkpoint
from bigdit.checkpoint import saver
from bigdit.checkpoint.export import PostHoc, coefficients
from bigdit.checkpoint.folder import open_snapshot
from bigdit.checkpoint.restore import load_kind
from bigdit.commands import export as export_command
from bigdit.errors import UserError
from bigdit.sampling import Sampler

WEIGHTS = "transformer_ema/diffusion_pytorch_model.safetensors"
# Weights that move as much at the end as at the beginning: EMAs of different widths then differ.
STEADY = (
    "train.lr_schedule=constant",
    "train.warmup_steps=0",
    "strategy.optimizer.lr=2e-3",
    "train.keep_checkpoints=99",
)
WIDTHS = (*STEADY, "strategy.ema.widths=[0.05, 0.1]")
KEPT = (*WIDTHS, "train.snapshot_every=5", "train.checkpoint_every=20")
STEPS = 40


@pytest.fixture(scope="module")
def kept(features, tmp_path_factory):
    """The last checkpoint of a run with 8 snapshots of two EMAs."""
    return run_to(STEPS, tmp_path_factory.mktemp("kept"), features, *KEPT)


@pytest.fixture
def copied(kept, tmp_path):
    """A copy of that output, to be damaged."""
    shutil.copytree(kept.folder.parents[1], tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    return tmp_path / "run"


def of(output):
    return checkpoint.latest(output)[0]


@given(st.lists(st.floats(1.05, 4), min_size=2, max_size=12), st.sampled_from([0.02, 0.05, 0.12]), st.data())
def test_a_profile_that_was_kept_is_made_of_itself_alone(times, narrow, data):
    """The others do not contribute, as far as they are no closer than a twentieth of the steps and twice the width."""
    steps = np.cumprod([100.0, *times]).astype(int).tolist()
    profiles = [(step, width) for step in steps for width in (narrow, 2 * narrow)]
    wanted = data.draw(st.integers(0, len(profiles) - 1))
    found, error = coefficients(profiles, profiles[wanted])
    assert error < 1e-6
    assert found == pytest.approx(np.eye(len(profiles))[wanted], abs=1e-6)


@given(st.integers(2, 40), st.floats(0.02, 0.25), st.integers(20, 10**7))
def test_a_profile_depends_on_the_share_of_the_steps_and_not_on_their_number(count, width, end):
    profiles = [((i + 1) / count, kept) for i in range(count) for kept in (0.05, 0.1)]
    _, of_shares = coefficients(profiles, (1, width))
    found, of_steps = coefficients([(end * share, kept) for share, kept in profiles], (end, width))
    assert of_steps == pytest.approx(of_shares, rel=1e-3, abs=1e-6)
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize(("width", "error"), [(0.07, 0.0134), (0.13, 0.0194)])
def test_more_snapshots_make_a_profile_finer(width, error):
    """Twice as many are four times as close: between two snapshots lies a parabola."""
    errors = []
    for count in (8, 16, 32, 64):
        profiles = [(1000 * (i + 1), kept) for i in range(count) for kept in (0.05, 0.1)]
        errors.append(coefficients(profiles, (1000 * count, width))[1])
    assert errors[0] == pytest.approx(error, rel=0.02)
    assert all(3.4 < before / after < 4.2 for before, after in itertools.pairwise(errors))


def test_an_ema_that_is_made_is_the_one_that_would_have_been_kept(kept, features, tmp_path):
    """A run that keeps these widths from the start has the same weights. The distance is below the profile's error as
    a share of the way to the weights, and a twentieth of the way to what was kept."""
    direct = run_to(STEPS, tmp_path / "direct", features, *STEADY, "strategy.ema.widths=[0.07, 0.13]")
    weights = _held(kept, "master")
    assert torch.equal(weights, _held(direct, "master"))
    for width, kind in ((0.07, "ema"), (0.13, "ema2")):
        posthoc, wanted = PostHoc(kept, width), _held(direct, kind)
        error = f"the error of its profile is {posthoc.error:.1%}"
        assert posthoc.message == f"the EMA of width {width} from 16 others: {error}"
        made = _shaped(kept)
        posthoc.fill(made)
        off = (_flat(made) - wanted).norm()
        assert off < posthoc.error * (weights - wanted).norm()
        assert off < min((_held(kept, each) - wanted).norm() for each in ("ema", "ema2")) / 20


def test_an_ema_that_is_made_is_exported_and_sampled_from(kept, tmp_path, capfd):
    export_command.run(kept.folder.parents[1], tmp_path / "made", ema_width=0.13)
    assert "the EMA of width 0.13 from 16 others: the error of its profile is 2.0%\n" in capfd.readouterr().err
    made, stored = load_file(tmp_path / "made" / WEIGHTS), _shaped(kept)
    PostHoc(kept, 0.13).fill(stored)
    assert all(torch.equal(made[name], tensor) for name, tensor in stored.items())
    sampler = Sampler(kept, torch.device("cpu"), posthoc=PostHoc(kept, 0.13))
    assert all(torch.equal(weight, made[name].to(weight.dtype)) for name, weight in sampler.model().named_parameters())


def test_an_ema_that_was_kept_is_made_to_the_last_places(kept, tmp_path):
    export_command.run(kept.folder, tmp_path / "made", ema_width=0.05)
    made, wanted = load_file(tmp_path / "made" / WEIGHTS), exported(kept, "transformer_ema")
    for name in wanted:
        torch.testing.assert_close(made[name], wanted[name], rtol=1e-6, atol=1e-8)


def _shaped(found):
    return {name: torch.empty(shape) for name, shape in found.state["parameters"].items()}


def _held(found, kind):
    """All that a checkpoint holds of a kind, joined, in fp64."""
    tensors = _shaped(found)
    load_kind(found, kind, tensors)
    return _flat(tensors)


def _flat(tensors):
    return torch.cat([tensors[name].double().view(-1) for name in sorted(tensors)])


_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from training import run_to

def end():
    while not Path(sys.argv[1], "ema_snapshots/step-00000008").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=end, daemon=True).start()
run_to(100000, Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
"""


def test_a_run_that_was_killed_between_snapshots_makes_the_same_emas(features, tmp_path):
    """From its snapshots and its checkpoint, to the bit. It makes snapshots after its checkpoint again."""
    every = (*WIDTHS, "train.snapshot_every=2", "train.checkpoint_every=3")
    straight = run_to(24, tmp_path / "straight", features, *every)
    (tmp_path / "killed.py").write_text(_KILLED)
    done = run_ranks(1, tmp_path / "killed.py", tmp_path / "run", features, *every, PYTHONPATH=HELPERS)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = of(tmp_path / "run")
    assert 6 <= before.step < 24
    resumed = run_to(24, tmp_path / "run", features, *every)
    names = [f"step-{step:08d}" for step in range(2, 25, 2)]
    for output in ("straight", "run"):
        assert sorted(each.name for each in (tmp_path / output / "ema_snapshots").iterdir()) == names
    for name in names:
        one, other = (_tensors(tmp_path / output / "ema_snapshots" / name) for output in ("straight", "run"))
        assert {key.split(".")[0] for key in one} == {"ema", "ema2"}
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    one, other = (_tensors(found.folder) for found in (straight, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert list(resumed.state["snapshots"]) == names
    PostHoc(resumed, 0.07)  # of snapshots of both, by the last checkpoint's checksums


def _tensors(folder):
    (file,) = folder.glob("engine/*.safetensors")
    return load_file(file)


def refused(output, width=0.07):
    with pytest.raises(UserError) as caught:
        PostHoc(of(output), width)
    (problem,) = caught.value.problems
    return problem


def test_what_emas_cannot_be_made_of_is_a_line(copied):
    root = copied / "ema_snapshots"
    assert refused(copied, 0.3) == "--ema-width is 0.3, and a number above 0 and below 0.288 was expected"
    assert refused(copied, 0.02) == (
        "--ema-width: the EMA of width 0.02 from 16 others: the error of its profile is 24.7%, and 5% is the "
        "most; widths near ema.widths [0.05, 0.1] are closer, and so are all with a smaller train.snapshot_every"
    )
    file = next((root / "step-00000010").glob("engine/*.safetensors"))
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert refused(copied) == (
        f"{file} is damaged: its checksum differs from that in snapshot.json; remove the snapshot, and EMAs are "
        "made without it"
    )
    shutil.rmtree(root / "step-00000010")
    shutil.copytree(root / "step-00000005", root / "step-00000010")
    assert refused(copied) == (
        f"{root}/step-00000010 is not the snapshot that {of(copied).folder} was trained with, but another run's, or of "
        "another course of this one; remove it, and EMAs are made without it"
    )
    shutil.rmtree(root / "step-00000010")
    assert PostHoc(of(copied), 0.07).message.startswith("the EMA of width 0.07 from 14 others: ")
    shutil.rmtree(root)
    assert refused(copied) == (
        f"--ema-width: {of(copied).folder} has no EMA snapshots before it; train with train.snapshot_every"
    )


def test_emas_are_made_at_the_step_of_any_checkpoint(kept):
    """From the snapshots before it. One equals the checkpoint's own EMAs, and counts once."""
    earlier, _ = checkpoint.find_checkpoint(kept.folder.with_name("step-00000020"))
    assert list(earlier.state["snapshots"]) == [f"step-{step:08d}" for step in (5, 10, 15, 20)]
    assert PostHoc(earlier, 0.07).message.startswith("the EMA of width 0.07 from 8 others: ")


def test_a_snapshot_is_no_checkpoint(kept):
    folder = kept.folder.parents[1] / "ema_snapshots/step-00000020"
    assert open_snapshot(folder).step == 20
    with pytest.raises(UserError, match=r"neither a checkpoint nor the output of a run that saved one"):
        checkpoint.find_checkpoint(folder)
    each = sum(file.stat().st_size for file in folder.rglob("*"))
    weights = sum(torch.Size(shape).numel() for shape in kept.state["parameters"].values())
    assert 2 * 4 * weights < each - folder.joinpath("engine").stat().st_size < 1.3 * 2 * 4 * weights


def test_a_run_without_two_emas_is_a_line(trained, features, tmp_path, capfd):
    found = of(trained)
    with pytest.raises(UserError) as caught:
        PostHoc(found, 0.1)
    assert str(caught.value) == f"--ema-width: {found.folder} holds no EMA; train with strategy.ema.widths"
    assert run(features, tmp_path, "train.snapshot_every=4", "strategy.ema.power=0.1") == 1
    assert capfd.readouterr().err == (
        "error: train.snapshot_every is 4, and strategy.ema.widths is missing: an EMA of another width is made from "
        "two; set it to [0.05, 0.1], or leave snapshot_every out\n"
    )


def test_what_snapshots_take_of_the_disk_is_reported_and_a_full_one_is_a_line(features, tmp_path, capfd, monkeypatch):
    def to_a_full_disk(tensors, file, metadata):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    monkeypatch.setattr(saver, "save_file", to_a_full_disk)
    assert run(features, tmp_path, *WIDTHS, "train.snapshot_every=2", "train.checkpoint_every=99") == 1
    printed = capfd.readouterr().err
    assert "note: each snapshot of 2 EMAs takes " in printed
    assert " of disk, and all 4 of train.steps 8 (train.snapshot_every 2) take " in printed
    assert f"error: cannot write the snapshot of the EMA {tmp_path}/ema_snapshots/step-00000002: " in printed
    assert " are free there; make room, raise train.snapshot_every, or choose another output\n" in printed
    assert not list((tmp_path / "ema_snapshots").iterdir())
