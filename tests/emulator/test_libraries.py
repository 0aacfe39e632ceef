"""The emulated GPU's libraries: how they are built, cached and found, and the message if they cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from bigdit import catalog
from bigdit.emulator import build, emulated_environment
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError


def test_libraries_stand_before_those_of_installed_packages(tmp_path):
    """torch's DT_RPATH leads to NVIDIA's packages beside it, before LD_LIBRARY_PATH."""
    site = tmp_path / "site"
    torch = Path(
        subprocess.run(
            [cuda_python(), "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    ).parent
    (site / "torch" / "lib").mkdir(parents=True)
    for file in torch.iterdir():
        if file.name != "lib":
            (site / "torch" / file.name).symlink_to(file)
    for file in (torch / "lib").iterdir():
        (site / "torch" / "lib" / file.name).symlink_to(file)
    nvidia = site / "nvidia" / "cu13" / "lib"
    nvidia.mkdir(parents=True)
    source = tmp_path / "real.c"
    source.write_text("#include <unistd.h>\n__attribute__((constructor)) void loaded(void) { _exit(77); }\n")
    name = "libcudart.so.13"
    subprocess.run(
        [build.compiler(), "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", nvidia / name], check=True
    )
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import torch; print(torch.__file__, torch.cuda.is_available())"
    )
    command = [str(cuda_python()), "-c", script]
    with warm.Executed(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        found, errors = process.communicate()
    assert found == f"{site}/torch/__init__.py True\n", errors
    built = next(folder for folder in build.cache_folder().iterdir() if (folder / name).exists())
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"LD_LIBRARY_PATH": str(built)}
    assert subprocess.run(command, env=plain, capture_output=True).returncode == 77  # without the hook NVIDIA's wins


def test_a_torch_without_cuda_says_how_to_get_one():
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "has no CUDA" in done.stderr
    assert "run `bigdit setup` and start the command with the python that it names" in done.stderr


def test_a_missing_compiler_is_a_line(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    build.recipe.cache_clear()
    with pytest.raises(UserError, match="no C compiler: no-such-compiler is not found"):
        emulated_environment(catalog.resolve_gpu("a40"))
    build.recipe.cache_clear()


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """A command that needs the libraries, its environment, and the folder that two of it filled at once. With -s it
    does not start warm, with libraries that are loaded already."""
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    environment["BIGDIT_EMULATED_CACHE"] = str(tmp_path_factory.mktemp("libraries"))
    command = [str(cuda_python()), "-s", "-W", "ignore", "-c", "import torch; print(torch.cuda.device_count())"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["1\n", "1\n"]
    (folder,) = Path(environment["BIGDIT_EMULATED_CACHE"]).iterdir()  # nothing half-built lies beside it
    return command, environment, folder


def test_libraries_are_built_once_and_by_one(at_once):
    command, environment, folder = at_once
    built = (folder / "libcuda.so.1").stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True)
    assert (folder / "libcuda.so.1").stat().st_mtime_ns == built


def test_damaged_libraries_are_built_again(at_once):
    command, environment, folder = at_once
    whole = (folder / "libcudart.so.13").read_bytes()
    for damage in (whole[:9000] + b"x" + whole[9001:], None):
        if damage is None:
            (folder / "libcudart.so.13").unlink()
        else:
            (folder / "libcudart.so.13").write_bytes(damage)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("1\n", 0)
        assert "is damaged, and is built again" in done.stderr
        assert (folder / "libcudart.so.13").read_bytes() == whole


def test_building_needs_only_a_compiler(tmp_path):
    """It needs no header and no library of NVIDIA's, and compiles without a warning."""
    for source in sorted(build.C.glob("*.c")):
        command = [build.compiler(), "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-nostdinc", "-c", source]
        standard = [f"-isystem{path}" for path in _include_paths()]
        subprocess.run([*command, *standard, "-o", tmp_path / "out.o"], check=True)
    assert shutil.which(build.compiler())


def _include_paths() -> list[str]:
    done = subprocess.run([build.compiler(), "-E", "-v", "-x", "c", "/dev/null"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("#include <"))
    last = next(i for i, line in enumerate(lines) if line.startswith("End of search list"))
    return [line.strip() for line in lines[first + 1 : last]]
