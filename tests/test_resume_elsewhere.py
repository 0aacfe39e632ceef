"""A run goes on under another engine and with another number of processes: the same state, by parameters' names."""

import json

import pytest
import torch
from conftest import BIN, ROOT, run_command
from rehearsing import SANA as MODEL
from rehearsing import SHAPE
from safetensors.torch import load_file, save_file
from whole import whole_state

from bigdit import checkpoint, engines, models
from bigdit.dist import World
from bigdit.engines.state import checkpoint_bytes
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.rehearse import RehearsalRequest, rehearse
from bigdit.spec import EmaSpec, ObjectiveSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

CPU = torch.device("cpu")
ADAMW = OptimizerSpec(lr=1e-3)


def strategy(engine="single", world_size=1, stage=None, **options):
    """A strategy of the tests', with DeepSpeed's document for `stage`."""
    document = None
    if stage is not None:
        document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
        document |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        document |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
        document["zero_optimization"] |= {"stage": stage}
    options = {"optimizer": ADAMW, "ema": EmaSpec(decay=0.9)} | options
    return Strategy(engine=engine, world_size=world_size, ds_config=document, **options)


def started(wanted, world, *, seed=0, found=None):
    """An engine over fresh weights, or over a checkpoint's, with its average and its step."""
    family = models.family(MODEL.class_name)
    model = models.build(MODEL, device="cpu", dtype=engines.compute_dtype(wanted), seed=seed)
    peers = checkpoint.Peers(world)
    if found is not None:
        checkpoint.check_resumable(found, MODEL, wanted)
        checkpoint.verify(found, peers)
        checkpoint.load_weights(found, model)
    engine = engines.create(wanted, model, family, device=CPU, world=world)
    ema = engines.ema_of(engine)
    if found is not None:
        checkpoint.restore(found, engine, peers, ema)

    def step():
        generator = torch.Generator().manual_seed(0)
        latents, text = (torch.randn(2, *shape, generator=generator) for shape in (SHAPE.latents, SHAPE.text))
        each = 2 // world.world_size
        mine = slice(world.rank * each, (world.rank + 1) * each)
        whole = Batch(latents, text, torch.ones(2, SHAPE.text[0]), (1, 2))
        mine = Batch(whole.latents[mine], whole.text_embeds[mine], whole.text_mask[mine], whole.seeds[mine])
        train_step(engine, family, ObjectiveSpec(), [mine], lr=1e-3, ema=ema)

    return engine, ema, step, peers


def save(folder, engine, ema, peers):
    described = {"model": MODEL.model_dump(mode="json"), "strategy": engine.strategy.model_dump(mode="json")}
    with checkpoint.Saver(folder, peers, checkpoint.Keeping(1)) as saver:
        saver.save(engine, ema, 1, described | {"run": {}, "data": None})


_ELSEWHERE = """
import json, sys
import torch, torch.distributed as dist
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from safetensors.torch import load_file, save_file
from test_resume_elsewhere import save, started, strategy
from whole import whole_state
from bigdit import checkpoint
from bigdit.dist import world_from_env
from bigdit.engines.state import checkpoint_bytes

torch.set_num_threads(1)
dist.init_process_group("gloo")
world, folder = world_from_env(), Path(sys.argv[2])
copied = json.loads((folder / "copied.json").read_text())
before = "single"
for name, wanted in {
    "zero0": strategy("deepspeed", 2, 0), "fsdp2": strategy("fsdp2", 2), "zero1": strategy("deepspeed", 2, 1),
    "zero3": strategy("deepspeed", 2, 3), "zero2": strategy("deepspeed", 2, 2),
}.items():
    found, _ = checkpoint.latest(folder / before)
    engine, ema, step, peers = started(wanted, world, seed=5, found=found)
    state, expected = whole_state(engine, ema), load_file(folder / f"{before}.safetensors")
    assert state.keys() == expected.keys(), (name, state.keys() ^ expected.keys())
    for key in state:
        assert torch.equal(state[key], expected[key]), (before, name, key)
    step()
    state = whole_state(engine, ema)
    if world.is_main:
        save_file(state, folder / f"{name}.safetensors")
        copied[name] = checkpoint_bytes(engine, ema)
    save(folder / name, engine, ema, peers)
    before = name
if world.is_main:
    (folder / "copied.json").write_text(json.dumps(copied))
dist.destroy_process_group()
"""

NAMES = ("zero0", "fsdp2", "zero1", "zero3", "zero2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of one process, taken up by two under one engine after the other, a step each; with what each held."""
    folder = tmp_path_factory.mktemp("elsewhere")
    engine, ema, step, peers = started(strategy(), World())
    step()
    save_file(whole_state(engine, ema), folder / "single.safetensors")
    save(folder / "single", engine, ema, peers)
    (folder / "copied.json").write_text(json.dumps({"single": checkpoint_bytes(engine, ema)}))
    script = folder / "elsewhere.py"
    script.write_text(_ELSEWHERE)
    done = run_command(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, script, ROOT / "tests", folder),
        PYTHONPATH=str(ROOT),
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_process_takes_up_what_two_had(runs, name):
    """Masters, average and optimizer state, to the bit; and the step counts of all are one higher each time."""
    found, _ = checkpoint.latest(runs / name)
    engine, ema, _, _ = started(strategy(), World(), seed=5, found=found)
    state, expected = whole_state(engine, ema), load_file(runs / f"{name}.safetensors")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert {tensor.item() for key, tensor in state.items() if key.startswith("state.step.")} == {NAMES.index(name) + 2}


@pytest.mark.slow
def test_each_process_has_written_its_share(runs):
    sizes = [file.stat().st_size for file in sorted((runs / "zero3/checkpoints/step-00000001/engine").iterdir())]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "zero2", "zero3", "fsdp2"])
def test_what_a_process_copies_to_save_is_rehearsed(runs, name):
    """The first process's copy, to the byte."""
    wanted = {
        "single": strategy(),
        "zero2": strategy("deepspeed", 2, 2),
        "zero3": strategy("deepspeed", 2, 3),
        "fsdp2": strategy("fsdp2", 2),
    }[name]
    asked = RehearsalRequest(model=MODEL, batch=SHAPE, strategy=wanted, micro_batch_sizes=(1,), kernels="cpu")
    (size,) = rehearse(asked).sizes
    copied = json.loads((runs / "copied.json").read_text())
    assert size.checkpoint_bytes == copied[name]


def test_state_in_blocks_stays_where_it_was_made(tmp_path):
    eight_bit = strategy(optimizer=OptimizerSpec(name="adamw_8bit_ao"), ema=None)
    engine, ema, step, peers = started(eight_bit, World())
    step()
    save(tmp_path, engine, ema, peers)
    found, _ = checkpoint.latest(tmp_path)
    elsewhere = strategy("fsdp2", 2, optimizer=OptimizerSpec(name="adamw_8bit_ao"), ema=None)
    with pytest.raises(UserError) as refused:
        checkpoint.check_resumable(found, MODEL, elsewhere)
    assert str(refused.value) == (
        f"{found.folder} holds the state of adamw_8bit_ao in blocks or factors as single made them, and the run is "
        f"fsdp2 on 2 processes; choose another output, or start from its weights: model.init_from={found.folder}"
    )
