"""Files that scripts save on an emulated GPU: small ones as they are, large ones with holes that load as zeros."""

import json
import os
import struct
import subprocess
import sys
import textwrap

import pytest
import torch

from bigdit.emulator.inside import sparse

BEGIN = """
import os
import sys
import torch
from bigdit.emulator.inside import imports, notices, sparse
sys.meta_path.insert(0, imports.Finder())
sparse.install_saving(torch)

def disk(path):
    return os.stat(path).st_blocks * 512

def said():
    return [found["text"].split(":")[0] for found in notices.found()]

BIG = 100 * 2**20
big = torch.ones(BIG // 4)
"""


def script(tmp_path, text):
    """Run a script in its own interpreter, as the hook would: it patches torch."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(text)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_torch_save_keeps_the_first_mebibyte_and_leaves_holes(tmp_path):
    script(
        tmp_path,
        """
        torch.save({"small": torch.arange(7), "big": big, "step": 3, "again": big}, "state.pt")
        assert os.path.getsize("state.pt") > BIG > 50 * disk("state.pt"), disk("state.pt")
        state = torch.load("state.pt")
        assert state["step"] == 3 and state["small"].tolist() == list(range(7))
        assert state["big"].shape == big.shape and not state["big"].any()
        assert state["again"].data_ptr() == state["big"].data_ptr()
        assert said() == ["torch.save"]
        with open("old.pt", "wb") as file:
            torch.serialization.save({"big": big}, file, _use_new_zipfile_serialization=False)
        assert disk("old.pt") < 2**21 and torch.load("old.pt")["big"].shape == big.shape
        """,
    )


def test_torch_save_keeps_small_tensors_after_the_first_mebibyte(tmp_path):
    script(
        tmp_path,
        """
        torch.save({"embeds": torch.ones(2**18), "big": big, "mask": torch.arange(120) < 50}, "state.pt")
        state = torch.load("state.pt")
        assert state["embeds"].all() and not state["big"].any()
        assert state["mask"].sum() == 50
        """,
    )


def test_small_files_are_written_as_they_are(tmp_path):
    script(
        tmp_path,
        """
        import io
        from safetensors.torch import load_file, save_file
        lora = {f"lora.{number}": torch.full((100, 100), float(number)) for number in range(20)}
        torch.save(lora, "lora.pt")
        save_file(lora, "lora.safetensors", metadata={"format": "pt"})
        buffer = io.BytesIO()
        torch.save({"big": big}, buffer)
        for found in (torch.load("lora.pt"), load_file("lora.safetensors")):
            assert all(found[name].equal(tensor) for name, tensor in lora.items())
        assert torch.load(io.BytesIO(buffer.getvalue()))["big"].equal(big)
        assert said() == []
        """,
    )


def test_safetensors_have_their_header_over_a_hole(tmp_path):
    script(
        tmp_path,
        """
        import pathlib
        import safetensors.torch
        from safetensors import safe_open
        tensors = {"b": big, "a": big.to(torch.bfloat16), "flags": torch.ones(3, dtype=torch.bool)}
        safetensors.torch.save_file(tensors, pathlib.Path("model.safetensors"), metadata={"format": "pt"})
        assert disk("model.safetensors") < 2**16
        assert os.path.getsize("model.safetensors") > 1.5 * BIG
        with safe_open("model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(tensors)
        loaded = safetensors.torch.load_file("model.safetensors")
        assert all(loaded[name].shape == tensors[name].shape for name in tensors)
        assert all(loaded[name].dtype == tensors[name].dtype and not loaded[name].any() for name in tensors)
        model = torch.nn.Linear(1000, 1000)
        safetensors.torch.save_model(model, "linear.safetensors")
        assert disk("linear.safetensors") < 2**16
        assert set(said()) == {"safetensors"}
        for refused in ({"a": big, "b": big}, {"a": torch.ones(1000, 2000).T}, [big]):
            try:
                safetensors.torch.save_file(refused, "refused.safetensors")
            except (RuntimeError, ValueError) as error:
                assert "safetensors" in str(error) or "contiguous" in str(error) or "Expected a dict" in str(error)
            else:
                raise AssertionError(refused)
        """,
    )


def test_holes_are_loaded_without_ram_and_data_next_to_them_as_it_is(tmp_path):
    script(
        tmp_path,
        """
        from bigdit.emulator.inside import sparse
        from safetensors.torch import load_file, save_file
        sparse.install_loading(torch)

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        save_file({"a": big, "b": big.to(torch.bfloat16)}, "model.safetensors")
        torch.save({"small": torch.arange(7), "big": big}, "state.pt")
        whole = torch.arange(2**20)
        save_file({"whole": whole[: 2**17]}, "small.safetensors")
        del big
        load_file("small.safetensors")["whole"].any(), torch.load("state.pt", mmap=True)["small"].any()
        before = resident()
        model, state = load_file("model.safetensors"), torch.load("state.pt", mmap=True)
        assert not model["a"].any() and not model["b"].any() and not state["big"].any()
        assert resident() - before < BIG, resident() - before
        assert state["small"].tolist() == list(range(7)) and model["a"].numel() == BIG // 4
        model["a"][-3:] = 5
        assert model["a"].sum() == 15 and not load_file("model.safetensors")["a"].any()
        assert load_file("small.safetensors")["whole"].equal(whole[: 2**17])
        with open("cut.pt", "wb") as file:
            file.truncate(100)
        for wrong in ("cut.pt", "absent.pt"):
            try:
                torch.UntypedStorage.from_file(wrong, False, 200)
            except RuntimeError as error:
                assert wrong in str(error), error
            else:
                raise AssertionError(f"{wrong} was loaded")
        """,
    )


def test_distributed_checkpoints_and_optimizers(tmp_path):
    script(
        tmp_path,
        """
        import torch.distributed.checkpoint as checkpoint
        model = torch.nn.Linear(4000, 4000)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4000)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), "optimizer.pt")
        assert disk("optimizer.pt") < 2**21
        optimizer.load_state_dict(torch.load("optimizer.pt"))
        checkpoint.save(model.state_dict(), checkpoint_id="dcp")
        written = sum(disk(f"dcp/{name}") for name in os.listdir("dcp"))
        assert written < 2**21, written
        state = model.state_dict()
        checkpoint.load(state, checkpoint_id="dcp")
        assert not state["weight"].any()
        assert set(said()) == {"torch.save"}
        """,
    )


def test_deepspeed_checkpoints(tmp_path):
    code = """
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(FREE))
        import deepspeed
        import bigdit.engines.deepspeed  # which compiles none of DeepSpeed's collectives, for most of a minute
        engine, *_ = deepspeed.initialize(
            model=torch.nn.Linear(2000, 2000),
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
                    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "bf16": {"enabled": True}},
        )
        engine.backward(engine(torch.ones(1, 2000, dtype=torch.bfloat16, device=engine.device)).sum())
        engine.step()
        engine.save_checkpoint("checkpoints", tag="one")
        written = {path: disk(f"checkpoints/one/{path}") for path in os.listdir("checkpoints/one")}
        assert len(written) == 2 and sum(written.values()) < 5 * 2**20, written
        assert sum(os.path.getsize(f"checkpoints/one/{path}") for path in written) > 50e6
        engine.load_checkpoint("checkpoints", tag="one")
        assert set(said()) == {"torch.save"}
        torch.distributed.destroy_process_group()
    """
    script(tmp_path, code.replace("FREE", str(20000 + os.getpid() % 20000)))


def test_headers_are_aligned_and_of_every_dtype(tmp_path):
    entries = [
        sparse.SparseEntry("flag", "bool", (3,)),
        sparse.SparseEntry("wide", "float64", (5,)),
        sparse.SparseEntry("none", "int8", (0,)),
    ]
    data_bytes = sparse.write(tmp_path / "a.safetensors", entries)
    text = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", text[:8])
    header = json.loads(text[8 : 8 + length])
    assert length % 8 == 0
    assert len(text) == 8 + length + data_bytes
    assert data_bytes == 3 + 40
    assert header["wide"]["data_offsets"] == [0, 40]
    with pytest.raises(KeyError):
        sparse.nbytes(sparse.SparseEntry("a", "complex128", (1,)))
    for name, (_, size) in sparse.DTYPES.items():
        assert getattr(torch, name).itemsize == size
