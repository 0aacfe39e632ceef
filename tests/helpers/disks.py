"""Real file systems of a few kilobytes, or that cannot be written."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(folder, options):
    """A tmpfs at `folder`, made if need be; remount it by `remount`. Skips where this machine lets nobody mount."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        yield folder
    finally:
        # Lazily: threads of a process that was killed may still hold files when it counts as ended.
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
