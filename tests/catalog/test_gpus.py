"""The GPUs of the catalogue: their facts and sources, their names, and what slices of them have."""

from collections import Counter

import pytest

from bigdit.catalog import gpu
from bigdit.catalog.gpus import CAPABILITIES, capability, gpus, mig_profiles, mig_slice
from bigdit.errors import UserError
from bigdit.units import MIB


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_every_gpu_is_sane_and_sourced(device):
    assert all(len(source) > 10 for source in device.sources.model_dump(exclude_none=True).values())
    assert (device.l2_mib is None) == (device.sources.l2 is None)
    assert 7 * 1024 < device.usable_mib <= device.total_mib
    assert device.usable_mib > 0.95 * device.total_mib
    for verified, source in (
        (device.total_verified, device.sources.total),
        (device.usable_verified, device.sources.usable),
    ):
        assert verified == (not source.startswith(("not verified", "derived")))
    rates, new = device.tflops, device.compute_capability >= (8, 0)
    assert (rates.bf16 is not None) == (rates.tf32 is not None) == new
    if rates.bf16 is not None and rates.tf32 is not None:
        assert rates.bf16 == rates.fp16
        assert rates.tf32 == pytest.approx(rates.bf16 / 2, rel=0.02)
    assert 4 <= rates.fp32 < rates.fp16 <= 2500
    assert 190 <= device.bandwidth_gbs <= 8000
    assert 15 < device.pcie_gbs <= device.host_gbs <= 450
    assert device.nvlink_gbs is None or 100 <= device.nvlink_gbs <= 1800


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_multiprocessors_agree_with_the_peak_rate(device):
    """Two operations a clock cycle and core give the rate at a clock that such chips have."""
    cores = device.multiprocessors * capability(device.compute_capability).cores
    assert 0.9 <= device.tflops.fp32 * 1e3 / (2 * cores) <= 3.1  # GHz


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_slices_have_multiprocessors_of_their_own(device):
    for part in (mig_slice(device, profile) for profile in mig_profiles(device)):
        share = part.multiprocessors / device.multiprocessors
        assert 0 < share <= 1
        assert part.tflops.fp32 == pytest.approx(device.tflops.fp32 * share, abs=0.01)
        assert part.l2_mib is part.sources.l2 is None


def test_what_devices_report_of_a_multiprocessor():
    assert {device.compute_capability for device in gpus()} == set(CAPABILITIES)
    for each in CAPABILITIES.values():
        assert each.threads % 32 == 0
        assert each.threads // each.blocks >= 32
        assert 48 * 1024 <= each.shared_optin_bytes <= each.shared_bytes
    a100, a40 = capability((8, 0)), capability((8, 6))
    assert (a100.threads, a100.blocks, a100.shared_bytes, a100.shared_optin_bytes) == (2048, 32, 167936, 166912)
    assert (a40.threads, a40.blocks, a40.shared_bytes, a40.shared_optin_bytes) == (1536, 16, 102400, 101376)
    with pytest.raises(UserError, match=r"^compute capability 6\.1 is not in the catalogue, which has 7\.0, 7\.5, "):
        capability((6, 1))


def test_multiprocessors_that_were_seen():
    """As torch.cuda.get_device_properties told them in public logs, with the second-level cache."""
    seen = {
        "Tesla T4": (40, 4),
        "NVIDIA A10G": (80, 6),
        "NVIDIA RTX A5000": (64, 6),
        "NVIDIA GeForce RTX 4090": (128, 72),
        "NVIDIA GeForce RTX 5080": (84, 64),
        "NVIDIA H100 80GB HBM3": (132, 50),
        "NVIDIA H200": (132, 60),
        "NVIDIA B200": (148, 126.5),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": (188, 128),
    }
    assert {title: (gpu(title).multiprocessors, gpu(title).l2_mib) for title in seen} == seen
    assert mig_slice(gpu("a100-80g-sxm"), "3g.40gb").multiprocessors == 42


def test_known_gpus():
    a40 = gpu("a40")
    assert (a40.total_bytes, a40.usable_bytes) == (46068 * MIB, 45416 * MIB)
    assert a40.compute_capability == (8, 6)
    assert gpu("v100-32g-sxm2").tflops.bf16 is None
    assert gpu("h200-sxm").usable_mib == 143156


def test_the_gpus_that_people_train_on():
    """Each of these as its driver names it, with the figures of its data sheet: bf16, memory GB/s, both NVLink ways."""
    asked = {
        "NVIDIA L4": (121, 300, None),
        "NVIDIA L40S": (362, 864, None),
        "NVIDIA A10G": (70, 600, None),
        "NVIDIA RTX A6000": (154.8, 768, 112.5),
        "NVIDIA RTX 6000 Ada Generation": (364.2, 960, None),
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 1792, None),
        "NVIDIA GeForce RTX 5090": (209.5, 1792, None),
        "NVIDIA H100 PCIe": (756, 2039, 600),
        "NVIDIA H100 80GB HBM3": (989, 3350, 900),
        "NVIDIA H100 NVL": (835, 3938, 600),
        "NVIDIA H20": (148, 4000, 900),
        "NVIDIA H200": (989, 4800, 900),
        "NVIDIA B200": (2250, 8000, 1800),
        "NVIDIA A800-SXM4-80GB": (312, 2039, 400),
        "NVIDIA A100-SXM4-40GB": (312, 1555, 600),
        "Tesla V100-SXM2-32GB": (None, 900, 300),
    }
    for title, figures in asked.items():
        device = gpu(title)
        assert (device.tflops.bf16, device.bandwidth_gbs, device.nvlink_gbs) == figures


def test_links_one_way():
    """PCIe's rates are those that the PCI-SIG's generations give 16 lanes; Grace has its own link to its GPUs."""
    assert gpu("v100-32g-sxm2").pcie_gbs == pytest.approx(15.754, abs=0.001)
    assert gpu("a40").pcie_gbs == pytest.approx(31.508, abs=0.001)
    assert gpu("h100-sxm").pcie_gbs == pytest.approx(63.015, abs=0.001)
    assert gpu("b300").pcie_gbs == 121
    assert gpu("rtx-4060").pcie_gbs == gpu("a40").pcie_gbs / 2
    assert (gpu("a100-80g-sxm").nvlink_one_way_gbs, gpu("l40s").nvlink_one_way_gbs) == (300, None)
    assert (gpu("gh200-96g").host_gbs, gpu("gb200").host_gbs) == (450, 225)
    assert gpu("h200-sxm").host_gbs == gpu("h200-sxm").pcie_gbs


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-16g-sxm2"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("a6000", "rtx-a6000"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA A800 80GB PCIe", "a800-80g-pcie"),
        ("h100-80gb-sxm", "h100-sxm"),
    ],
)
def test_gpu_aliases(written, meant):
    assert gpu(written).name == meant


def test_unknown_and_ambiguous_gpus():
    with pytest.raises(UserError, match=r"gpu 'a100' is ambiguous; name one of a100-40g-sxm, .*a100-80g-pcie"):
        gpu("a100")
    with pytest.raises(UserError, match=r"gpu 'rtx-4091' is not in the catalogue; did you mean rtx-4090"):
        gpu("rtx-4091")


TITLES = Counter(device.title for device in gpus())


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_the_drivers_name_finds_the_gpu(device):
    if TITLES[device.title] == 1:
        assert gpu(device.title).name == device.name
    else:  # the driver calls both sizes the same
        with pytest.raises(UserError, match=f"is ambiguous; name one of .*{device.name}"):
            gpu(device.title)
