"""A rehearsal imports what is installed, whatever lies in the folder where it is asked for."""

import os
import subprocess
import sys

import pytest
from commands import ROOT


@pytest.mark.slow
def test_a_file_named_as_a_module_of_python_is_not_imported(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('mine')\n")
    command = "from bigdit.cli import main; main(['rehearse', '--model', 'dit-s-8', '--gpu', 'a40'])"
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "mine" in done.stderr) == (0, False), done.stderr
    assert "dit-s-8" in done.stdout
