"""A SLURM cluster of two machines on loopback addresses: Debian's programs, unpacked into a folder."""

import getpass
import os
import shutil
import socket
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from commands import ROOT
from linux import end_with_parent
from running import Run, until

from bigdit.train.processes.launch import free_port

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"]
LIBRARIES = ["libmunge2", "libhwloc15", "liblua5.1-0"]
NODES = ("127.0.0.1", "127.0.0.2")
"""Machine names that need no entry in /etc/hosts."""
GPUS = ("/dev/null", "/dev/zero")
"""Devices that stand for a machine's GPUs: SLURM only checks that they exist."""

# cred_expire: a requeued job starts after this many seconds; the least is 5.
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
PluginDir={libraries}/slurm-wlm
PlugStackConfig={folder}/plugstack.conf
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
{nodes}
PartitionName=usual Nodes=ALL Default=YES GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=10
"""


def unpack(folder):
    """Unpack Debian's Slurm into `folder`. Skips the test where it cannot be downloaded."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("SLURM cannot be had here: no apt-get and dpkg")
    folder.mkdir(exist_ok=True)
    got = subprocess.run(
        ["apt-get", "download", "-q", *PACKAGES, *LIBRARIES], cwd=folder, capture_output=True, text=True
    )
    if got.returncode:
        pytest.skip(f"SLURM cannot be had here: {got.stderr.strip().splitlines()[-1]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        package.unlink()
    for program in folder.glob("usr/sbin/*-wlm"):  # only a program named slurmd takes the GPUs of slurm.conf
        program.rename(program.with_name(program.name.removesuffix("-wlm")))


class Cluster:
    """A running cluster. `environment` lets sbatch and the others find it, and has all that a job needs."""

    def __init__(self, programs, folder):
        self.folder, self._programs = folder, programs
        (libraries,) = (found.parent for found in programs.glob("usr/lib/*/slurm-wlm"))
        path = f"{programs}/usr/bin:{programs}/usr/sbin:{os.environ['PATH']}"
        own = {"PATH": path, "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm"}
        own |= {"SLURM_CONF": f"{folder}/slurm.conf", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own
        self._configure(libraries)

    def _configure(self, libraries):
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "plugstack.conf").touch()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in GPUS))
        host = socket.gethostname().partition(".")[0]
        node = f"NodeHostname={host} CPUs=8 RealMemory=1000 Gres=gpu:{len(GPUS)}"
        nodes = "\n".join(f"NodeName={name} NodeAddr={name} Port={free_port()} {node}" for name in NODES)
        known = {"host": host, "user": getpass.getuser(), "port": free_port(), "nodes": nodes}
        (self.folder / "slurm.conf").write_text(_CONF.format(folder=self.folder, libraries=libraries, **known))

    def run(self, *command, environment=None):
        """Run one of SLURM's commands. Returns its output."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=ROOT, env=environment or self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, output, *words):
        """Submit the job `sbatch WORDS`, which trains into `output`."""
        log = output.with_suffix(".log")
        return Run(Job(self, self.run("sbatch", "--parsable", f"--output={log}", *words).strip()), output, log)

    def start(self, stack):
        """Start the cluster's daemons; they end with `stack`."""
        where, sbin = self.folder, self._programs / "usr/sbin"
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        munge = [f"--{option}={where}/{name}" for option, name in files.items()]
        self._daemon(stack, "munged", sbin / "munged", "--foreground", "--force", *munge)
        until((where / "munge.socket").exists, within=30)
        self._daemon(stack, "slurmctld", sbin / "slurmctld", "-D", "-c")
        for node in NODES:
            self._daemon(stack, node, sbin / "slurmd", "-D", "-N", node, "-d", sbin / "slurmstepd")
        until(lambda: self.run("sinfo", "-h", "-N", "-p", "usual", "-o", "%T").split() == ["idle"] * 2, within=60)

    def _daemon(self, stack, name, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        stack.callback(process.wait)
        stack.callback(process.terminate)


class Job:
    """A job with a process's interface. It has ended when SLURM will not start it again."""

    def __init__(self, slurm, name):
        self._slurm, self.name = slurm, name

    def shows(self):
        """All fields of the job, as SLURM shows them."""
        said = self._slurm.run("scontrol", "show", "job", "-o", self.name)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def poll(self):
        """The exit status, 128 + n if signal n ended the job, or None while it runs."""
        shows = self.shows()
        if shows["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return None
        status, signum = map(int, shows["ExitCode"].split(":"))
        return status or (signum and 128 + signum)

    def wait(self, timeout):
        until(lambda: self.poll() is not None, within=timeout)
        return self.poll()

    def restarts(self):
        return int(self.shows()["Restarts"])

    def minutes(self):
        """How long the job has run."""
        hours, minutes, _ = map(int, self.shows()["RunTime"].split(":"))
        return 60 * hours + minutes

    def update(self, *changes):
        self._slurm.run("scontrol", "update", f"JobId={self.name}", *changes)


@contextmanager
def cluster(programs, folder):
    """Start the two machines, and leave nothing of them behind."""
    with ExitStack() as stack:
        made = Cluster(programs, folder)
        made.start(stack)
        yield made
