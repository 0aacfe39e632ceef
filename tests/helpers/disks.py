"""Real file systems that are a few kilobytes large, or read-only."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(folder, options):
    """Mount a tmpfs at `folder`; change it by `remount`. Skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        yield folder
    finally:
        # Detach lazily: threads of a killed process may still hold files when the process counts as ended.
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
