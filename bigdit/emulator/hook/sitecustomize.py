"""Every python process of an emulated command runs this before its script. It loads `inside`, and starts it.

The folder is loaded by its path, since the process may run in an environment without bigdit.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _observe() -> None:
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inside")
    spec = importlib.util.spec_from_file_location(
        "bigdit_emulated", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bigdit_emulated"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.start()


def _next() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _of_machine() -> None:
    """Take the GPUs of the machine that SLURM started this process for."""
    machines, number = os.environ.get("BIGDIT_EMULATED_NODES", ""), os.environ.get("SLURM_NODEID", "")
    if machines and number:
        found = machines.splitlines()
        if int(number) >= len(found):
            sys.stderr.write(f"error: SLURM runs {int(number) + 1} machines or more, and --nodes is {len(found)}\n")
            os._exit(1)
        os.environ["BIGDIT_EMULATED_GPU"] = found[int(number)]


if "BIGDIT_EMULATED_GPU" in os.environ:
    _of_machine()
    _observe()
_next()
