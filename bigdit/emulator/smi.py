"""`nvidia-smi` of the emulated GPU: a program on the PATH of an emulated command, with no other file.

It prints what NVML returns there (c/nvml.c), in the format of the real one. On stderr it says that the GPU is emulated.
"""

from __future__ import annotations

import argparse
import datetime
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

DRIVER, CUDA = "580.00", "13.0"
MIB = 1 << 20
UNKNOWN = "[N/A]"
INVALID, NO_DEVICE = 2, 6
"""Exit statuses of the real one, for an invalid argument and a missing GPU."""

_ROW = struct.Struct("i4x16Q")
"""A process, and its bytes on each GPU (`struct row` of c/gpu.c)."""

_SUPPORTED = "an emulated GPU supports the table, -L, -i, --query-gpu and --query-compute-apps with --format=csv"


@dataclass(frozen=True)
class ListedGpu:
    """A GPU of the machine, with the bytes of each of its processes."""

    index: int
    count: int
    name: str
    capability: str
    total: int
    usable: int
    processes: Mapping[int, int]

    @property
    def used(self) -> int:
        return sum(self.processes.values())

    @property
    def uuid(self) -> str:
        return f"GPU-b1b1b1b1-b1b1-b1b1-b1b1-b1b1b1b1b1{self.index:02x}"

    @property
    def bus(self) -> str:
        return f"00000000:{self.index + 1:02X}:00.0"


GPU_FIELDS: dict[str, tuple[str, Callable[[ListedGpu], object]]] = {
    "timestamp": ("", lambda _: f"{datetime.datetime.now():%Y/%m/%d %H:%M:%S.%f}"[:-3]),
    "count": ("", lambda gpu: gpu.count),
    "index": ("", lambda gpu: gpu.index),
    "name": ("", lambda gpu: gpu.name),
    "gpu_name": ("", lambda gpu: gpu.name),
    "uuid": ("", lambda gpu: gpu.uuid),
    "gpu_uuid": ("", lambda gpu: gpu.uuid),
    "pci.bus_id": ("", lambda gpu: gpu.bus),
    "gpu_bus_id": ("", lambda gpu: gpu.bus),
    "driver_version": ("", lambda _: DRIVER),
    "compute_cap": ("", lambda gpu: gpu.capability),
    "memory.total": ("MiB", lambda gpu: gpu.total // MIB),
    "memory.reserved": ("MiB", lambda gpu: (gpu.total - gpu.usable) // MIB),
    "memory.used": ("MiB", lambda gpu: gpu.used // MIB),
    "memory.free": ("MiB", lambda gpu: (gpu.usable - gpu.used) // MIB),
    "utilization.gpu": ("%", lambda _: 0),  # no kernel runs
    "utilization.memory": ("%", lambda _: 0),
    "temperature.gpu": ("", lambda _: UNKNOWN),
    "power.draw": ("W", lambda _: UNKNOWN),
    "power.limit": ("W", lambda _: UNKNOWN),
    "mig.mode.current": ("", lambda _: UNKNOWN),
}
"""The fields of a GPU: unit and value."""

APP_FIELDS: dict[str, tuple[str, Callable[[tuple[ListedGpu, int]], object]]] = {
    "pid": ("", lambda app: app[1]),
    "process_name": ("", lambda app: program(app[1])),
    "used_memory": ("MiB", lambda app: app[0].processes[app[1]] // MIB),
    "used_gpu_memory": ("MiB", lambda app: app[0].processes[app[1]] // MIB),
    "gpu_name": ("", lambda app: app[0].name),
    "gpu_uuid": ("", lambda app: app[0].uuid),
    "gpu_bus_id": ("", lambda app: app[0].bus),
}
"""The fields of a process on a GPU."""


def main(arguments: Sequence[str]) -> int:
    """Answer as nvidia-smi does, with its exit status."""
    parser = _Parser(prog="nvidia-smi", description="nvidia-smi of an emulated GPU.", allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id", metavar="GPUS", help="indices, UUIDs or bus ids")
    parser.add_argument("--query-gpu", metavar="FIELDS", help=", ".join(GPU_FIELDS))
    parser.add_argument("--query-compute-apps", metavar="FIELDS", help=", ".join(APP_FIELDS))
    parser.add_argument("--format", metavar="csv[,noheader][,nounits]")
    asked = parser.parse_args(arguments)
    print("nvidia-smi: no GPU is here; bigdit answers for an emulated one", file=sys.stderr)
    gpus = machine(os.environ["BIGDIT_EMULATED_GPU"])
    if asked.id is not None:
        named = asked.id.split(",")
        gpus = [gpu for gpu in gpus if not {str(gpu.index), gpu.uuid, gpu.bus}.isdisjoint(named)]
    if not gpus:
        print("No devices were found")
        return NO_DEVICE
    if asked.query_gpu is not None:
        return _csv(parser, asked.query_gpu, asked.format, GPU_FIELDS, gpus)
    if asked.query_compute_apps is not None:
        apps = [(gpu, process) for gpu in gpus for process in gpu.processes]
        return _csv(parser, asked.query_compute_apps, asked.format, APP_FIELDS, apps)
    if asked.list_gpus:
        print(*(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})" for gpu in gpus), sep="\n")
    else:
        print(table(gpus))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"nvidia-smi: {message}; {_SUPPORTED}", file=sys.stderr)
        sys.exit(INVALID)


def machine(settings: str) -> list[ListedGpu]:
    """The GPUs in BIGDIT_EMULATED_GPU (launch.py), with their processes."""
    figures, name = f" {settings}".split(" name=", 1)
    has = dict(figure.split("=", 1) for figure in figures.split())
    rows = _rows(has.get("state"))
    return [
        ListedGpu(
            index=index,
            count=int(has["count"]),
            name=name,
            capability=f"{has['major']}.{has['minor']}",
            total=int(has["total"]),
            usable=int(has["usable"]),
            processes={process: taken[index] for process, *taken in rows if taken[index]},
        )
        for index in range(int(has["count"]))
    ]


def _rows(state: str | None) -> list[tuple[int, ...]]:
    """The rows of living processes. Rows of ended ones are free (c/gpu.c)."""
    if state is None:
        return []
    held = Path(state).read_bytes()
    rows = _ROW.iter_unpack(held[: len(held) // _ROW.size * _ROW.size])
    return [row for row in rows if row[0] > 0 and Path(f"/proc/{row[0]}").exists()]


def program(process: int) -> str:
    """The path of a process's program."""
    try:
        return os.readlink(f"/proc/{process}/exe")
    except OSError:
        return UNKNOWN


def _csv(
    parser: _Parser, asked: str, form: str | None, fields: Mapping[str, tuple[str, Callable]], rows: Sequence
) -> int:
    """Print the requested fields of rows. An unknown field is rejected as by the real one."""
    words = [word.strip() for word in (form or "").split(",")]
    if words[0] != "csv" or not set(words[1:]) <= {"noheader", "nounits"}:
        parser.error(f"--format is {form!r}; a query takes csv[,noheader][,nounits]")
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in fields:
            print(f'Field "{name}" is not a valid field to query.')
            return INVALID
    if "noheader" not in words:
        print(", ".join(f"{name} [{fields[name][0]}]" if fields[name][0] else name for name in names))
    for row in rows:
        cells = [(fields[name][1](row), fields[name][0]) for name in names]
        with_unit = "nounits" not in words
        print(
            ", ".join(
                f"{value} {unit}" if with_unit and unit and value != UNKNOWN else f"{value}" for value, unit in cells
            )
        )
    return 0


def table(gpus: Sequence[ListedGpu]) -> str:
    """The table of the command without arguments."""
    line, thick = f"+{'-' * 89}+", f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|"
    parted = thick.replace("|", "+").replace("=", "-")
    version = f"{DRIVER} (emulated)"
    rows = [
        line,
        f"| NVIDIA-SMI {version:<22} Driver Version: {DRIVER:<14} CUDA Version: {CUDA:<8} |",
        parted,
        f"| {'GPU  Name':<25}{'Persistence-M':>14} | {'Bus-Id':<15}{'Disp.A':>7} | {'Volatile Uncorr. ECC':<20} |",
        f"| {'Fan  Temp   Perf':<26}{'Pwr:Usage/Cap':>13} | {'Memory-Usage':>22} | {'GPU-Util  Compute M.':<20} |",
        thick,
    ]
    for gpu in gpus:
        memory = f"{gpu.used // MIB}MiB / {gpu.total // MIB:>6}MiB"
        rows += [
            f"| {gpu.index:>3}  {gpu.name[:30]:<30} {'Off':>3} | {gpu.bus:<16} {'Off':>5} | {'N/A':>20} |",
            f"| {'N/A   N/A':<20} {'N/A /  N/A':>18} | {memory:>22} | {'0%':>8} {'Default':>11} |",
            parted,
        ]
    rows += ["", line, f"| {'Processes:':<87} |", f"| {' GPU        PID   Process name':<74}{'GPU Memory':>13} |"]
    rows.append(f"|{'=' * 89}|")
    apps = [(gpu, process) for gpu in gpus for process in gpu.processes]
    for gpu, process in apps:
        taken = f"{gpu.processes[process] // MIB}MiB"
        rows.append(f"| {gpu.index:>4} {process:>10}   {program(process)[-55:]:<55} {taken:>13} |")
    rows += [] if apps else [f"| {'  No running processes found':<87} |"]
    return "\n".join([*rows, line])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
