"""The memory that this process may use: the machine's, or less by the limit of a container or a scheduler."""

from bigdit.machine import memory_bytes
from bigdit.units import GIB


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_without_a_limit_it_is_the_machine_s(tmp_path):
    whole = memory_bytes(tmp_path)  # without control groups
    assert whole > GIB
    unlimited = {"proc/self/cgroup": "0::/user.slice", "sys/fs/cgroup/user.slice/memory.max": "max"}
    assert memory_bytes(written(tmp_path, unlimited)) == whole
    first = {
        "proc/self/cgroup": "4:memory:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,  # version 1's word for no limit
    }
    assert memory_bytes(written(tmp_path, first)) == whole


def test_a_container_s_limit(tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": GIB}
    assert memory_bytes(written(tmp_path, files)) == GIB


def test_the_least_limit_of_all_groups_around_it(tmp_path):
    job = "system.slice/slurmstepd.scope/job_7"
    files = {
        "proc/self/cgroup": f"0::/{job}/step_0/user/task_0",
        f"sys/fs/cgroup/{job}/memory.max": GIB // 2,
        f"sys/fs/cgroup/{job}/step_0/memory.max": GIB,
        f"sys/fs/cgroup/{job}/step_0/user/task_0/memory.max": "max",
    }
    assert memory_bytes(written(tmp_path, files)) == GIB // 2


def test_the_first_version_s_groups(tmp_path):
    """The container's name for its group is the host's, whose folders it does not see."""
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/0a1b\n4:memory:/docker/0a1b\n0::/docker/0a1b",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
    }
    assert memory_bytes(written(tmp_path, files)) == GIB
