"""`bigdit plan` and `bigdit.plan`: exit status, output, and that both agree."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from commands import DIGITS, ROOT, bigdit, in_process
from gpus import empty_cache
from safetensors.numpy import save_file
from tiny_models import SANA

from bigdit import catalog
from bigdit.config.plan_file import read_plan_file
from bigdit.config.stages import load_run, load_stages
from bigdit.search.plan import LIBRARIES_BYTES
from bigdit.strategy import StepSize

TINY = ("--model", "dit-s-8")
SANA_1600M = catalog.model("sana-1600m").spec
SMALL_SANA = SANA.kwargs | {"in_channels": 32, "out_channels": 32}
# What differs between two answers to one request.
PASSING = ("seconds",)


def plan_json(*arguments):
    done = in_process("plan", *arguments, "--json")
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        (
            ["--model", "sana-160m", "--gpu", "a4", "--gpus", "0", "--images", "lots"],
            [
                "error: --model 'sana-160m' is not in the catalogue; did you mean sana-1600m",
                "error: --gpu 'a4' is not in the catalogue; did you mean a40",
                "error: --images expects a number such as 250000, 1.5k or 30M, and 'lots' was found",
                "error: --gpus is 0, and 1 or more was expected",
            ],
        ),
        (
            ["--model", "sana-1600m", "--gpu", "a40", "--resolution", "1000,512", "--resolution", "500"],
            [
                "error: --resolution 1000: a side is 1000, but sana-1600m-1024 takes multiples of 32",
                "error: --resolution 500: a side is 500, but sana-1600m-1024 takes multiples of 32",
            ],
        ),
        (
            ["--model", "sana-1600m", "--gpu", "a40", "--gpus", "8", "--engine", "single", "--epochs", "0"],
            [
                "error: --epochs is 0.0, and a number above 0 was expected",
                "error: --engine single runs on one GPU, and --gpus is 8;",
            ],
        ),
    ],
)
def test_errors_are_a_line_each(arguments, errors):
    done = in_process("plan", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == len(errors)
    assert all(line.startswith(error) for line, error in zip(lines, errors, strict=True))


@pytest.mark.slow
def test_the_first_plan(golden):
    """docs/plan.md shows what the command prints, at 80 columns and without colour."""
    done = in_process("plan", "--model", "sana-1600m", "--gpu", "a40")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    golden("plan-sana-1600m-a40.txt", done.stdout)


def test_the_docs_show_the_plan():
    plan = (ROOT / "tests/golden/plan-sana-1600m-a40.txt").read_text()
    assert plan.strip() in (ROOT / "docs/plan.md").read_text()


def test_the_first_plan_says_what_to_go_on_with_where_memory_runs_out():
    """The same samples a step, with more recomputed or fewer at once. The second answer comes from the cache."""
    _, printed, _ = plan_json("--model", "sana-1600m", "--gpu", "a40")
    chosen = StepSize(**{key: printed["chosen"]["strategy"][key] for key in StepSize.model_fields})
    sizes = [chosen, *map(StepSize.model_validate, printed["smaller"])]
    assert len(sizes) > 1
    assert {size.micro_batch_size * size.grad_accum_steps for size in sizes} == {chosen.micro_batch_size}
    for before, after in itertools.pairwise(sizes):
        assert (
            after.micro_batch_size < before.micro_batch_size or after.checkpointed_blocks > before.checkpointed_blocks
        )


@pytest.mark.slow
def test_a_plan_for_people_for_machines_and_for_python(tmp_path, monkeypatch):
    """One request, asked three ways. The second and third answers come from the cache. On a stderr that is no
    terminal a plan prints its stages, a line each, but none if it is cached. stdout has the plan alone."""
    monkeypatch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path / "cache")))
    fixed = {"images": "10k", "global_batch": 64, "engine": "single", "optimizer": "adamw"}
    named = [word for name, value in fixed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options = (*TINY, "--gpu", "rtx-3060", *named)
    shown = bigdit("plan", *options, "--out", tmp_path / "plan", timeout=500)
    assert shown.returncode == 0, shown.stderr
    # Paths are as long as they are, and commands may be copied whole.
    assert max(len(line) for line in shown.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert "FITS" in shown.stdout
    assert shown.stderr.splitlines()[:3] == [
        f"planning the training of dit-s-8: {stage}"
        for stage in ("which engines and settings fit", "the fastest alternatives", "the largest micro-batches")
    ]
    assert {"plan.yaml", "run.yaml", "report.html"} <= {file.name for file in (tmp_path / "plan").iterdir()}

    status, printed, told = plan_json(*options)
    assert (status, printed["fits"], printed["verdict"], told) == (0, True, "FITS", "")
    assert printed["request"]["images"] == 10_000
    assert not {"packed_timeline", "ran"} & set(printed)
    assert len(json.loads((tmp_path / "plan/plan.json").read_text())["ran"]) > 1

    code = (
        "import bigdit, json\n"
        f"plan = bigdit.plan('dit-s-8', 'rtx-3060', **{fixed})\n"
        "print(json.dumps(plan.model_dump(mode='json', exclude={'packed_timeline', 'ran'}) | {'fits': plan.fits}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    python = json.loads(done.stdout)
    for passing in PASSING:
        del python[passing], printed[passing]
    assert python == printed


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer_with_status_2(tmp_path):
    """With what would fit: each of these ran, on GPUs of its kind."""
    config = {"_class_name": SANA_1600M.class_name, **SANA_1600M.kwargs, "num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pinned = ("--engine", "single", "--optimizer", "adamw", "--resolution", "512", "--host-memory", "64GiB")
    asked = ("--model", tmp_path / "config.json", "--gpu", "rtx-3060-12g", "--reserve", "8800MiB")
    status, found, _ = plan_json(*asked, *pinned)
    assert (status, found["fits"], found["verdict"]) == (2, False, "DOES NOT FIT")
    assert found["chosen"]["headroom_bytes"] < 0
    ways = found["fixes"]
    fixed, more_gpus, adapters, larger = (way["reason"] for way in ways)
    assert (fixed, larger) == ("without what was fixed", "a larger GPU")
    assert ways[0]["strategy"]["optimizer"]["name"] != "adamw"
    assert "GPUs instead of 1" in more_gpus
    assert adapters == "LoRA over frozen weights: another training"
    assert all(way["verdict"] == "FITS" and way["headroom_bytes"] >= 0 for way in ways)
    assert all(way["peak_reserved_bytes"] >= way["peak_allocated_bytes"] == max(way["phases"].values()) for way in ways)


def test_several_machines_are_planned_with_one_less_too(tmp_path, monkeypatch):
    """The trainer continues with one less by the same command. plan.yaml has what that needs."""
    cluster = ("--gpus", 3, "--gpus-per-node", 1, "--global-batch", 6)
    pinned = ("--engine", "zero2", "--optimizer", "adamw", "--buckets", "none")
    done = in_process("plan", "--model", "dit-s-8", "--gpu", "a40", *pinned, *cluster, "--out", tmp_path)
    assert done.returncode == 0
    assert (
        "note: without one machine, the same command goes on with 2 GPUs and the same global batch of 6: micro-batch 2 "
        "in 2 passes with 2 repeated samples; FITS, up to 1.62 GiB" in " ".join(done.stdout.split())
    )
    fewer = read_plan_file(tmp_path).without_machine
    sizes = {"micro_batch_size": 2, "grad_accum_steps": 2, "repeated_samples": 2, "dp_replicate": 1}
    assert fewer.model_dump().items() >= {"world_size": 2, "global_batch_size": 6, "verdict": "FITS", **sizes}.items()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    (stage,) = load_stages(tmp_path / "run.yaml", ["model.init_from=null"], 2)
    assert "the plan for 2 GPUs: FITS, up to 1.62 GiB" in stage.notices("")
    (stage,) = load_stages(tmp_path / "run.yaml", ["model.init_from=null"], 1)
    assert "the plan is for another strategy" in " ".join(stage.notices(""))


def test_a_global_batch_that_gpus_do_not_divide_is_filled_up(tmp_path):
    """As the trainer fills it up. The plan's run gets the same plan again."""
    asked, pinned = ("plan", "--gpu", "a40", "--gpus", 3, "--json"), ("--engine", "zero2", "--optimizer", "adamw")
    sizes = ("--buckets", "none", "--global-batch", 7)
    done = in_process(*asked, "--model", "dit-s-8", *pinned, *sizes, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    strategy = plan["chosen"]["strategy"]
    sizes = [strategy[key] for key in ("micro_batch_size", "grad_accum_steps", "repeated_samples")]
    assert sizes == [3, 1, 2]
    rate, seconds = plan["chosen"]["samples_per_second_per_gpu"], plan["chosen"]["step"]["seconds"]
    assert rate["high"] * seconds["low"] * 3 == pytest.approx(7)  # repeated samples are not among them
    assert "micro-batch 3 × 3 GPUs = 7 a step, and 2 repeated with weight 0" in (tmp_path / "report.html").read_text()
    again = in_process(*asked, "--config", tmp_path / "run.yaml")
    assert again.returncode == 0, again.stderr
    (same,) = json.loads(again.stdout)["plans"]
    assert (same["request"]["global_batch_size"], same["chosen"]["strategy"]) == (7, strategy)
    run = load_run(tmp_path / "run.yaml", ["model.init_from=null"])
    assert (run.strategy.global_batch_size, run.strategy.places) == (7, 9)


def test_python_asks_as_the_command_does():
    """`bigdit.plan` exists before its imports, and has the command's options."""
    code = (
        "import sys, bigdit\n"
        "assert 'plan' in dir(bigdit) and not any(name.startswith('bigdit.') for name in sys.modules)\n"
        "import inspect\n"
        "print(*inspect.signature(bigdit.plan).parameters)\n"
        "assert inspect.signature(bigdit.plan).return_annotation == 'Plan'\n"
        "assert bigdit.plan.__doc__.startswith('The plan for')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = in_process("plan", "--help").stdout
    for name in done.stdout.split():
        assert f"--{name.replace('_', '-')} " in shown, name


@pytest.mark.slow
def test_a_run_with_stages_has_a_plan_of_each_by_which_it_trains(tmp_path):
    """A stage's values are fixed, and its plan fills in the rest."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "SanaTransformer2DModel", **SMALL_SANA}))
    run = {
        "model": {"path": str(tmp_path / "config.json")},
        "data": {"images": "images", "features": "features", "buckets": [[512, 512]]},
        "encoders": {"image": {"name": "vae", "class_name": "AutoencoderDC", "path": "vae"}, "text": {"path": "t5"}},
        "strategy": {
            "engine": "single",
            "global_batch_size": 4,
            "checkpointed_blocks": 0,
            "optimizer": {"name": "adamw"},
        },
        "train": {},
        "stages": [{"data": {"buckets": [[256, 256]]}, "train": {"epochs": 2}}, {"train": {"steps": 3}}],
        "output": "run",
    }
    config, plans = tmp_path / "run.yaml", tmp_path / "plans"
    config.write_text(yaml.safe_dump(run))
    done = in_process(
        "plan", "--config", config, "--gpu", "rtx-4090", "--out", plans, "--set", "strategy.precision=bf16_sr"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"to train: bigdit train --config {plans}/run.yaml"
    done = in_process("train", "--config", plans / "run.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "the plan is for another strategy" not in done.stderr
    strategies = [stage["strategy"] for stage in json.loads(done.stdout)["stages"]]
    recorded = [yaml.safe_load((plans / f"stage-{number}/plan.yaml").read_text()) for number in (0, 1)]
    assert json.loads((plans / "stage-0/plan.json").read_text())["request"]["epochs"] == 2
    assert [each["request"]["resolution"] for each in recorded] == [[256, 256], [512, 512]]
    assert [each["micro_batch_size"] for each in strategies] == [
        each["strategy"]["micro_batch_size"] for each in recorded
    ]
    assert {each["precision"] for each in strategies} == {"bf16_sr"}


@pytest.mark.slow
def test_what_a_run_holds_out_and_draws_is_in_its_plan(tmp_path):
    """Images for validation are encoded, but not trained on. What generates samples is in CPU memory."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "SanaTransformer2DModel", **SMALL_SANA}))
    for name, rows in (("t5/model", 3), ("vae/diffusion_pytorch_model", 2)):
        (tmp_path / name).parent.mkdir()
        save_file({"a": np.zeros((rows, 2**20), np.float32)}, tmp_path / f"{name}.safetensors")
    run = {
        "model": {"path": str(tmp_path / "config.json")},
        "data": {"images": "images", "features": "features", "buckets": [[256, 256]]},
        "encoders": {
            "image": {"name": "vae", "class_name": "AutoencoderDC", "path": str(tmp_path / "vae")},
            "text": {"path": str(tmp_path / "t5"), "dtype": "bf16"},
        },
        "strategy": {
            "engine": "single",
            "global_batch_size": 4,
            "micro_batch_size": 4,
            "checkpointed_blocks": 0,
            "optimizer": {"name": "adamw"},
        },
        "train": {"steps": 20},
        "validation": {"samples": 200},
        "samples": {"captions": ["a fox"]},
        "output": "run",
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run))
    asked = ("--config", config, "--gpu", "rtx-4090", "--images", 1000)
    done = in_process("plan", *asked, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["plans"]
    assert (found["request"]["epochs"], found["run"]["steps"], found["dataset"]["images"]) == (0.1, 20, 1000)
    host = found["host"]
    assert host["samples_bytes"] == (3 * 2 + 2 * 4) * 2**20
    held = max(host["process_bytes"], host["steps_bytes"] + host["checkpoint_bytes"])
    assert host["node_bytes"] == found["chosen"]["host_bytes"] == held + LIBRARIES_BYTES + host["samples_bytes"]
    text = " ".join(in_process("plan", *asked).stdout.split())
    assert "800 images (200 for validation) × 0.1 epochs, 20 steps" in text
    assert "0.01 GiB to generate samples (text encoder, VAE)" in text
    (tmp_path / "vae/diffusion_pytorch_model.safetensors").unlink()
    unknown = "the CPU memory of the VAE is not known, and not counted: no weights there"
    assert unknown in " ".join(in_process("plan", *asked).stdout.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--config", DIGITS, "--ema", "cpu"],
            "--ema goes with --model; with --config it is --set strategy.ema.device=cpu",
        ),
        (
            ["--config", DIGITS, "--engine", "fsdp2-offload"],
            "--engine goes with --model; with --config it is --set strategy.engine=fsdp2 --set "
            "strategy.cpu_offload=true",
        ),
        (
            ["--config", DIGITS, "--lora", "16"],
            "--lora goes with --model; with --config it is --set strategy.lora.rank=16",
        ),
        (
            [*TINY, "--config", DIGITS],
            "--model dit-s-8 and --config each say what is planned; leave one of them out",
        ),
        ([*TINY, "--config", "nosuch.yaml"], "the config nosuch.yaml does not exist"),
        (
            ["--config", DIGITS, "--set", "train.steps=5", "--set", "train.steps=6"],
            "--set has train.steps 2 times; give it once",
        ),
        ([*TINY, "--set", "a=1"], "--set needs --config, and --model was given; leave it out"),
        (
            [*TINY, "--also-gpus", "2"],
            "--also-gpus needs --out DIR, which writes report.html; add --out, or leave it out",
        ),
        (
            [*TINY, "--out", "plan", "--also-gpus", "1,2"],
            "--also-gpus has 1, the plan's own number of GPUs; leave it out there",
        ),
        (
            [*TINY, "--out", "plan", "--also-gpus", "two"],
            "--also-gpus expects numbers of GPUs such as 2,4,8, each from 1 to 4096, and 'two' was found",
        ),
        (
            [*TINY, "--out", "plan", "--also-gpus", "2,3,4,5"],
            "--also-gpus 2,3,4,5 has 4 numbers; a page has at most 3",
        ),
        (
            [*TINY, "--out", "plan", "--also-gpus", "2,12"],
            "--also-gpus has 12, but must be a multiple of --gpus-per-node 8; nearest: 8 or 16",
        ),
        (
            [*TINY, "--out", "plan", "--engine", "single", "--also-gpus", "2"],
            "--engine single runs on one GPU, and --also-gpus has 2; use --engine ddp, zero1, zero2, zero3 or fsdp2, "
            "or leave it out",
        ),
        (
            [*TINY, "--ema-widths", "0.1"],
            "--ema-widths is 0.1, and two widths or more were expected, such as 0.05,0.1",
        ),
        ([*TINY, "--gpus", "100001"], "--gpus is 100001, and plans go up to 4096"),
        (
            ["--config", DIGITS, "--features", "online"],
            "--features goes with --model; with --config it is --set strategy.features=online --set data.features=null",
        ),
        (
            ["--config", DIGITS, "--out", "plan", "--also-gpus", "2"],
            "--also-gpus needs --model, and --config was given; leave it out",
        ),
        ([], "--model is missing; name one of `bigdit models`, or a diffusers config.json or folder"),
    ],
)
def test_a_plan_is_of_a_model_or_of_a_run(arguments, line):
    done = in_process("plan", "--gpu", "a40", *arguments)
    assert (done.returncode, done.stderr) == (1, f"error: {line}\n")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and 1 or more was expected"),
        ({"colour": 3}, "does not take it; known: "),
        ({"attention_head_dim": 33}, "its arguments do not fit together: mat1 and mat2 shapes cannot be multiplied ("),
    ],
)
def test_a_model_that_its_class_refuses_is_reported_before_it_is_planned(argument, line, tmp_path):
    """Without a strategy's name, since every strategy would be refused."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "SanaTransformer2DModel", **SMALL_SANA, **argument}))
    done = in_process("plan", "--model", file, "--gpu", "rtx-4090")
    assert (done.returncode, done.stdout) == (1, "")
    *stages, printed = done.stderr.splitlines()
    assert all(each.startswith("planning ") for each in stages)
    assert printed.startswith(f"error: --model: {file}: ")
    assert line in printed
    done = in_process("profile", "--model", file, "--gpu", "rtx-4090")
    assert (done.returncode, done.stderr.startswith(f"error: --model: {file}: "), line in done.stderr) == (
        1,
        True,
        True,
    )


@pytest.mark.parametrize(
    "asked", [TINY, ("--config", ROOT / "bigdit/recipes/sana-600m-stages-rtx-4090.yaml")], ids=["one", "stages"]
)
def test_a_folder_that_takes_no_plan_is_reported_before_one_is_made(asked, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = in_process(
        "plan", *asked, "--gpu", "rtx-4090", "--out", tmp_path / "file/plan", BIGDIT_CACHE=tmp_path / "cache"
    )
    printed = f"error: --out: cannot write {tmp_path}/file/plan"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(printed)
    assert done.stderr.endswith(": Not a directory; choose another\n")
    assert not (tmp_path / "cache").exists()
