"""The stub libraries: compiled where they are first wanted, into the user's cache, once for each build of torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bigdit.cache import cache_root
from bigdit.emulator.stubs import MANNERS, sources
from bigdit.emulator.symbols import Library, wanted
from bigdit.errors import UserError
from bigdit.files import TEMPORARY

C = Path(__file__).parent / "c"

BY_HAND = {
    "libcuda.so": "card.c",
    "libcudart.so": "runtime.c",
    "libcublas.so": "blas.c",
    "libcublasLt.so": "blaslt.c",
    "libcudnn.so": "dnn.c",
    "libcufft.so": "fft.c",
    "libnccl.so": "nccl.c",
    "libnvidia-ml.so": "nvml.c",
    "libnvrtc.so": "nvrtc.c",
}
"""The C file of each library that does more than succeed or refuse."""

HOST, HOST_SOURCES = "libbigdit-host.so", ("host.c", "blank.c")

DIGESTS = "digests.json"
"""SHA-256 of each library by its name, beside them; checked before they are loaded (inside/libraries.py)."""

_FLAGS = ("-O1", "-fPIC", "-shared", "-pthread", "-Wl,-rpath,$ORIGIN")


def cache_folder() -> Path:
    """Where built libraries lie."""
    return cache_root() / "emulator"


def compiler() -> str:
    """The C compiler: CC, or cc. Raises UserError where there is none."""
    asked = os.environ.get("CC") or "cc"
    found = shutil.which(asked.split()[0])
    if found is None:
        raise UserError(
            f"no C compiler: {asked} is not found, and the emulated card's libraries are compiled at first use; "
            "install one (Debian: apt-get install gcc) or name it in CC"
        )
    return found


@functools.cache
def recipe() -> str:
    """A digest of all that decides what is built beside the packages: these sources and the compiler.

    Raises UserError as `compiler` does.
    """
    digest = hashlib.sha256(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    here = Path(__file__).parent
    for file in sorted([*C.iterdir(), here / "build.py", here / "stubs.py", here / "symbols.py"]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def build(packages: Sequence[Path], folder: Path) -> None:
    """Compile what these packages want into `folder`, which appears when it is whole.

    Of processes that build at once one wins. Raises UserError for what cannot be compiled, with the compiler's words.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        libraries = wanted(packages)
        for name in sorted(libraries, key=lambda name: name != "libcuda.so.1"):  # the others are linked to it
            _library(name, libraries[name], temporary)
        _cc(temporary, "-o", HOST, *(str(C / name) for name in HOST_SOURCES), "-ldl")
        built = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(temporary.iterdir())}
        (temporary / DIGESTS).write_text(json.dumps(built))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise UserError(
            f"the emulated card's libraries cannot be written to {folder}: {error.strerror or error}"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _library(name: str, library: Library, folder: Path) -> None:
    stem = re.sub(r"\.so\..*", ".so", name)
    if stem not in MANNERS:
        raise UserError(
            f"the packages want {name}, which an emulated card does not have; known are {', '.join(MANNERS)}"
        )
    by_hand = C / BY_HAND[stem] if stem in BY_HAND else None
    written = set() if by_hand is None else _functions(by_hand)
    generated = folder / f"{stem}.c"
    generated.write_text(sources(name, library.functions.keys() - written))
    script = folder / f"{stem}.map"
    script.write_text(_versions(library))
    linked = [] if stem == "libcuda.so" else ["-L.", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
    parts = [str(generated), *([str(by_hand)] if by_hand else [])]
    _cc(folder, "-o", name, f"-Wl,-soname,{name}", f"-Wl,--version-script={script}", *parts, *linked, "-ldl")
    generated.unlink()
    script.unlink()


def _functions(source: Path) -> set[str]:
    """The public functions that a C file defines: they begin a line, and are not static."""
    return set(
        re.findall(r"^(?!static|typedef|struct \w+ \{)[\w ]+?\**(\w+)\([^;]*?\{", source.read_text(), re.MULTILINE)
    )


def _versions(library: Library) -> str:
    """A linker's version script; functions without a version are in the last one."""
    versions = sorted({version for version in library.functions.values() if version})
    if not versions:
        return "{ global: *; };\n"
    named = {v: [name for name, version in library.functions.items() if version == v] for v in versions[:-1]}
    rest = "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in named.items())
    return rest + f"{versions[-1]} {{ global: *; }};\n"


def _cc(folder: Path, *arguments: str) -> None:
    done = subprocess.run([compiler(), *_FLAGS, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise UserError(f"{compiler()} cannot build the emulated card's libraries: {said}")


def main(arguments: Sequence[str]) -> int:
    """`python -m bigdit.emulator.build FOLDER PACKAGE…`, as the hook in an emulated process calls it."""
    folder, *packages = map(Path, arguments)
    build(packages, folder)
    return 0


if __name__ == "__main__":
    from bigdit.errors import guard

    sys.exit(guard(lambda: main(sys.argv[1:])))
