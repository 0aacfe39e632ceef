"""The GPU of --gpu and --gpu-memory: slices, other memories, this machine's own, and every error text.

This machine has no GPU: nvidia-smi is a fake script on PATH that prints what a real one would.
"""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit.catalog import found_gpus, gpu, resolve_gpu
from bigdit.catalog.gpus import gpus, mig_profiles, mig_slice
from bigdit.errors import UserError
from bigdit.units import GIB, MIB

A40 = "0, GPU-11111111-aaaa, NVIDIA A40, 46068, 4, 45461, [N/A]"
A100 = "1, GPU-22222222-bbbb, NVIDIA A100-SXM4-80GB, 81920, 2, 81151, Disabled"


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Put a fake nvidia-smi that prints these lines first on PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def nvidia_smi(*lines, status=0):
        script = tmp_path / "nvidia-smi"
        printed = "".join(f"echo '{line}'\n" for line in lines)
        script.write_text(
            f'#!/bin/sh\ncase "$1" in --query-gpu=index,uuid,name,*) ;; *) exit 9;; esac\n{printed}exit {status}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return nvidia_smi


def test_names_of_the_catalogue():
    assert resolve_gpu("a40") == gpu("a40")
    assert resolve_gpu(" NVIDIA GeForce RTX 4090 ").name == "rtx-4090"
    assert resolve_gpu("rtx4090").name == "rtx-4090"
    with pytest.raises(UserError, match=r"^gpu 'a100' is ambiguous; name one of a100-40g-sxm"):
        resolve_gpu("a100:3g.40gb")


def test_a_slice_is_a_gpu_of_its_own():
    part, whole = resolve_gpu("a100-80g-sxm:3g.40gb"), gpu("a100-80g-sxm")
    assert (part.name, part.title) == ("a100-80g-sxm:3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert part.usable_bytes == part.total_bytes == 39.25 * GIB
    assert part.tflops.bf16 == round(whole.tflops.bf16 * 42 / 108, 2)
    assert part.bandwidth_gbs == 1019.5
    assert (part.nvlink_gbs, part.nvlink_one_way_gbs, part.pcie_gbs) == (None, None, whole.pcie_gbs)
    assert part.sources.compute.startswith("42 of 108 multiprocessors (nvidia-smi mig -lgip of an A100 80GB")
    assert resolve_gpu("h100-sxm:1g.10gb").usable_mib == 9984
    for written in ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-80g-sxm:3g.40gb+me", "A100-80G-SXM:3G.40GB+ME.ALL"):
        assert resolve_gpu(written) == part
    assert resolve_gpu("v100-32g-sxm2").tflops.bf16 is None


SLICED = [device for device in gpus() if mig_profiles(device)]


@pytest.mark.parametrize("device", SLICED, ids=lambda device: device.name)
def test_slices_are_parts_of_their_gpu(device):
    parts = [mig_slice(device, profile) for profile in mig_profiles(device)]
    for part in parts:
        slices, gb = (int(digits) for digits in re.fullmatch(r".*:(\d)g\.(\d+)gb", part.name).groups())
        assert 0.85 * gb * 1e9 <= part.usable_bytes <= min(device.usable_bytes, 1.08 * gb * 1e9)
        for rate, whole in zip(part.tflops.model_dump().values(), device.tflops.model_dump().values(), strict=True):
            assert rate is whole is None or 0.8 * slices / 7 < rate / whole <= max(1, slices / 4)
        assert part.bandwidth_gbs / device.bandwidth_gbs >= 0.9 * part.usable_bytes / device.usable_bytes
        assert part.usable_verified == (not part.sources.usable.startswith("derived"))
    assert parts[-1].bandwidth_gbs == device.bandwidth_gbs
    assert sorted(part.usable_mib for part in parts) == [part.usable_mib for part in parts]


def test_errors_of_slices():
    message = "a100-80g-sxm has no MIG profile '3g.20gb'; it has 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"
    with pytest.raises(UserError) as error:
        resolve_gpu("a100-80g-sxm:3g.20gb")
    assert error.value.problems == (message,)
    with pytest.raises(UserError, match=r"^l4 has no MIG slices here; GPUs that have: a30, a100-40g-pcie"):
        resolve_gpu("l4:1g.6gb")


def test_a_memory_takes_the_place_of_the_gpus(capsys):
    device = resolve_gpu("a40", "45465MiB")
    assert (device.name, device.title) == ("a40", "NVIDIA A40 with 45465 MiB")
    assert (device.usable_bytes, device.total_bytes) == (45465 * MIB, 46068 * MIB)
    assert device.tflops == gpu("a40").tflops
    assert device.sources.usable.startswith("--gpu-memory 45465MiB, in place of 45416 MiB (")
    assert capsys.readouterr().err == ""
    modded = resolve_gpu("rtx-4090", "49140MiB")
    assert modded.usable_bytes == modded.total_bytes == 49140 * MIB
    assert resolve_gpu("a40", "24GB").usable_mib == 24_000_000_000 // MIB
    assert resolve_gpu("a100-80g-sxm:3g.40gb", "38GiB").usable_bytes == 38 * GIB


def test_the_total_of_nvidia_smi_is_taken_with_a_warning(capsys):
    assert resolve_gpu("a40", "46068MiB").usable_bytes == 46068 * MIB
    assert capsys.readouterr().err == (
        "--gpu-memory 46068MiB is the total of the a40 in nvidia-smi and not its used + free, 45416 MiB, which "
        "processes see; the plan may be too optimistic\n"
    )


@pytest.mark.parametrize(
    ("name", "memory", "message"),
    [
        ("a40", "500GiB", "--gpu-memory 500GiB is 500.00 GiB, and the a40, of 46068 MiB, can have 5759 to 96742 MiB"),
        ("a40", "1GB", "--gpu-memory 1GB is 0.93 GiB, and the a40, of 46068 MiB, can have 5759 to 96742 MiB"),
        (
            "a40",
            "46068",
            "--gpu-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and '46068' was found",
        ),
        (
            "a40",
            "lots",
            "--gpu-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and 'lots' was found",
        ),
        (
            "a40",
            "1.2.3GB",
            "--gpu-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and '1.2.3GB' was found",
        ),
        (
            "a40",
            "-24GB",
            "--gpu-memory: a memory size with a unit was expected, such as 46068MiB or 24GB, and '-24GB' was found",
        ),
        (None, None, "no GPU was named; --gpu takes one of `bigdit gpus`, or auto for this machine's own"),
        (
            None,
            "46068MiB",
            "--gpu-memory 46068MiB says nothing of speed; name a GPU with the right rates by --gpu, "
            "nearest in memory: a40 (46068 MiB), l20 (46068 MiB), l40 (46068 MiB)",
        ),
        (
            "custom",
            "80GB",
            "--gpu-memory 80GB says nothing of speed; name a GPU with the right rates by --gpu, "
            "nearest in memory: h100-pcie (81559 MiB), h100-sxm (81559 MiB), h800-pcie (81559 MiB)",
        ),
    ],
)
def test_errors_of_memory(name, memory, message):
    with pytest.raises(UserError) as error:
        resolve_gpu(name, memory)
    assert error.value.problems == (message,)


@given(st.sampled_from([device.name for device in gpus()]), st.integers(0, 400_000))
def test_every_memory_is_taken_as_it_is_or_refused(name, mib):
    device = gpu(name)
    if 10 * device.total_mib <= 80 * mib <= 168 * device.total_mib:  # from an eighth to 2.1 times
        taken = resolve_gpu(name, f"{mib}MiB")
        assert taken.usable_mib == mib <= taken.total_mib
    else:
        with pytest.raises(UserError, match=rf"can have {-(-device.total_mib // 8)} to \d+ MiB$"):
            resolve_gpu(name, f"{mib}MiB")


def test_the_machines_own_gpus(nvidia_smi, capsys):
    nvidia_smi(A40, A100)
    first, second = found_gpus()
    assert (first.name, first.usable_mib, first.total_mib) == ("a40", 45465, 46068)
    assert first.sources.usable == "nvidia-smi of this machine: used 4 and free 45461 MiB"
    assert (second.name, second.usable_mib, second.tflops) == ("a100-80g-sxm", 81153, gpu("a100-80g-sxm").tflops)
    assert resolve_gpu("auto") == first
    assert capsys.readouterr().err == (
        "this machine's GPUs differ: a40 (44.40 GiB), a100-80g-sxm (79.25 GiB); planned for the a40, which has the "
        "least memory\n"
    )
    nvidia_smi(*[A40] * 8)
    assert len(found_gpus()) == 8
    assert resolve_gpu("AUTO", "40GiB").usable_bytes == 40 * GIB


def test_one_name_of_two_gpus_is_reported_apart_by_memory(nvidia_smi):
    nvidia_smi("0, GPU-1, NVIDIA GeForce RTX 3080, 12288, 400, 11600, [N/A]")
    assert resolve_gpu("auto").name == "rtx-3080-12g"
    nvidia_smi("0, GPU-1, NVIDIA GeForce RTX 4090, 49140, 1, 48600, [N/A]")
    assert (resolve_gpu("auto").name, resolve_gpu("auto").usable_mib) == ("rtx-4090", 48601)


def test_the_gpus_that_cuda_would_show(nvidia_smi, monkeypatch):
    nvidia_smi(A40, A100)
    for listed, names in (
        ("1", ["a100-80g-sxm"]),
        ("1,0", ["a100-80g-sxm", "a40"]),
        ("GPU-1111", ["a40"]),
        ("0,-1,1", ["a40"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert [device.name for device in found_gpus()] == names
    for listed in ("", "-1", "7", "MIG-33333333"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        message = rf"^--gpu auto: CUDA_VISIBLE_DEVICES={listed} shows none of this machine's 2 GPUs; unset it, or name"
        with pytest.raises(UserError, match=message):
            found_gpus()


def test_memory_in_use_by_others_is_reported(nvidia_smi, capsys):
    nvidia_smi("0, GPU-1, NVIDIA A40, 46068, 20000, 25465, [N/A]")
    assert resolve_gpu("auto").usable_mib == 45465
    assert capsys.readouterr().err == (
        "GPU 0, a40: 20000 MiB of 45465 are in use by other programs; the plan assumes the whole GPU\n"
    )


def test_gpus_that_cannot_be_planned_for_are_all_reported_at_once(nvidia_smi):
    nvidia_smi(
        "0, GPU-1, NVIDIA GeForce RTX 4090 Laptop GPU, 16376, 10, 15900, [N/A]",
        "1, GPU-2, GRID A100D-10C, 10240, 0, 10000, [N/A]",
        "2, GPU-3, NVIDIA A100-SXM4-80GB, 81920, 2, 81151, Enabled",
    )
    with pytest.raises(UserError) as error:
        resolve_gpu("auto")
    assert error.value.problems == (
        "GPU 0 of this machine, 'NVIDIA GeForce RTX 4090 Laptop GPU' with 15910 MiB, is not in the catalogue; plan "
        "with the rates of one like it: --gpu rtx-4090 --gpu-memory 15910MiB",
        "GPU 1 of this machine, 'GRID A100D-10C' with 10000 MiB, is not in the catalogue; plan with the rates of one "
        "like it: --gpu rtx-3080-10g --gpu-memory 10000MiB",
        "GPU 2 of this machine, a100-80g-sxm, is divided by MIG; name a slice of it: --gpu a100-80g-sxm:1g.10gb (it "
        "has 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb)",
    )


INSTEAD = r"; name a GPU instead, such as --gpu a100-80g-sxm \(`bigdit gpus` lists all\)$"


def test_a_machine_without_gpus(nvidia_smi, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = r"^--gpu auto needs nvidia-smi, which is not on the PATH"
    with pytest.raises(UserError, match=missing + INSTEAD):
        resolve_gpu("auto")
    for lines, status in (((), 0), (("No devices were found",), 6)):
        nvidia_smi(*lines, status=status)
        with pytest.raises(UserError, match=r"^--gpu auto: nvidia-smi finds no GPU in this machine" + INSTEAD):
            resolve_gpu("auto")
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the driver.", status=9)
    with pytest.raises(UserError, match=r"^--gpu auto: nvidia-smi failed with status 9: NVIDIA-SMI has .*" + INSTEAD):
        resolve_gpu("auto")
    nvidia_smi("0, GPU-1, NVIDIA GB10, [N/A], [N/A], [N/A], [N/A]")
    with pytest.raises(UserError, match=r"^--gpu auto: nvidia-smi shows no memory of a GPU \('0, GPU-1, NVIDIA GB10, "):
        resolve_gpu("auto")
    (tmp_path / "nvidia-smi").write_text("#!/no/such/interpreter\n")
    with pytest.raises(UserError, match=r"^--gpu auto: .*/nvidia-smi does not run \(No such file or directory\)"):
        resolve_gpu("auto")


def test_no_torch_is_asked():
    script = "import sys; from bigdit.catalog import found_gpus, resolve_gpu; resolve_gpu('a40', '44GiB')\n"
    script += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
