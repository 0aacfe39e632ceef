"""The catalogue's GPUs: facts and sources, names, and what their slices have."""

from collections import Counter

import pytest

from bigdit.catalog import gpu
from bigdit.catalog.gpus import CAPABILITIES, capability, gpus, mig_profiles, mig_slice
from bigdit.errors import UserError
from bigdit.units import MIB


def test_every_gpu_is_sane_and_sourced():
    for each in gpus():
        assert all(len(source) > 10 for source in each.sources.model_dump(exclude_none=True).values()), each.name
        assert (each.l2_mib is None) == (each.sources.l2 is None), each.name
        assert 7 * 1024 < each.usable_mib <= each.total_mib, each.name
        assert each.usable_mib > 0.95 * each.total_mib, each.name
        assert each.usable_verified == (not each.sources.usable.startswith(("not verified", "derived"))), each.name
        rates, new = each.tflops, each.compute_capability >= (8, 0)
        assert (rates.bf16 is not None) == (rates.tf32 is not None) == new, each.name
        if rates.bf16 is not None and rates.tf32 is not None:
            assert rates.bf16 == rates.fp16, each.name
            assert rates.tf32 == pytest.approx(rates.bf16 / 2, rel=0.02), each.name
        assert (rates.fp8 is not None) == (each.compute_capability >= (8, 9)), each.name
        assert rates.fp8 is None or rates.fp8 == pytest.approx(2 * rates.fp16, rel=0.02), each.name
        assert 4 <= rates.fp32 < rates.fp16 <= 2500, each.name
        assert 190 <= each.bandwidth_gbs <= 8000, each.name
        assert 15 < each.pcie_gbs <= each.host_gbs <= 450, each.name
        assert each.nvlink_gbs is None or 100 <= each.nvlink_gbs <= 1800, each.name


def test_multiprocessors_agree_with_the_peak_rate():
    """Two operations per clock cycle and core give the rate, at a clock that such chips have."""
    for each in gpus():
        cores = each.multiprocessors * capability(each.compute_capability).cores
        assert 0.9 <= each.tflops.fp32 * 1e3 / (2 * cores) <= 3.1, each.name  # GHz


def test_slices_have_multiprocessors_of_their_own():
    for each in gpus():
        for part in (mig_slice(each, profile) for profile in mig_profiles(each)):
            share = part.multiprocessors / each.multiprocessors
            assert 0 < share <= 1, each.name
            assert part.tflops.fp32 == pytest.approx(each.tflops.fp32 * share, abs=0.01), each.name
            assert part.l2_mib is part.sources.l2 is None, each.name


def test_what_devices_report_of_a_multiprocessor():
    assert {each.compute_capability for each in gpus()} == set(CAPABILITIES)
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
    """By torch.cuda.get_device_properties in public logs, with the second-level cache."""
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
    """Each by its driver's name, with its data sheet's figures: bf16, memory GB/s, both NVLink directions."""
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
        each = gpu(title)
        assert (each.tflops.bf16, each.bandwidth_gbs, each.nvlink_gbs) == figures


def test_links_one_way():
    """PCIe's rates are those of 16 lanes of the PCI-SIG's generations. Grace has its own link to its GPUs."""
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


TITLES = Counter(each.title for each in gpus())


def test_the_drivers_name_finds_the_gpu():
    for each in gpus():
        if TITLES[each.title] == 1:
            assert gpu(each.title).name == each.name
        else:  # the driver gives both sizes the same name
            with pytest.raises(UserError, match=f"is ambiguous; name one of .*{each.name}"):
                gpu(each.title)
