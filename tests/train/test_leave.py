"""How a launched process ends: with its status, output and exit functions, and without taking libraries apart."""

import sys

import pytest
from commands import run_command

LEAVES = """
import atexit, threading, time
from bigdit.train.processes.end import leave

class Late:
    def __del__(self):
        print("taken apart")

late = Late()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's end"))).start()
print("the last line", end="")
leave({status})
"""


@pytest.mark.parametrize("status", [0, 1, 143])
def test_it_ends_with_its_status_when_its_threads_have_ended(status):
    done = run_command(sys.executable, "-c", LEAVES.format(status=status))
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == "the last linea thread's end\nat exit\n"


def test_ctrl_c_while_it_ends_changes_nothing_that_is_printed():
    at_exit = "import os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\nleave("
    done = run_command(sys.executable, "-c", LEAVES.format(status=0).replace("leave(", at_exit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the last linea thread's end\n", "")


def test_words_that_cannot_be_written_are_no_success():
    done = run_command(
        "sh", "-c", 'exec "$0" -c "$1" >/dev/full', sys.executable, LEAVES.format(status=0), PYTHONUNBUFFERED=""
    )
    assert (done.returncode, done.stdout) == (120, "")
