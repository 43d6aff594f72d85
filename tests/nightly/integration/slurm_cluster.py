"""A Slurm cluster of three nodes on this machine, with its own munge, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "sinfo", "scontrol")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 20.0

CONFIG = """
ClusterName=cosmos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
KillWait=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=1000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of its own needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


class Cluster:
    """A running cluster; `environment` is what its commands need."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {"SLURM_CONF": str(place / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{PATH}"}

    def call(self, *command: str) -> str:
        """Output of a command, which must succeed."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` tells of the first component of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str, timeout_s: float) -> dict[str, str]:
        """The job, once it is in one of these states."""
        deadline = time.monotonic() + timeout_s
        while (found := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, found
            # Where nothing else changes, the scheduler of heterogeneous jobs does not look at its queue again.
            self.call("scontrol", "update", "PartitionName=main", "State=UP")
            time.sleep(0.5)
        return found


@contextlib.contextmanager
def running_cluster(place: Path) -> Iterator[Cluster]:
    """Start munged, slurmctld and three slurmd; end them, and all jobs, on leaving.

    Args:
        place: An empty folder.
    """
    ctld = _free_block(4)
    first = ctld + 1
    host = socket.gethostname().partition(".")[0]
    (place / "slurm.conf").write_text(
        CONFIG.format(host=host, place=place, ctld=ctld, first=first, last=first + 2), encoding="ascii"
    )
    for number in range(4):
        # Slurm tells steps only of devices, which these need not be.
        with contextlib.suppress(PermissionError):
            os.mknod(place / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(195, number))
        (place / f"gpu{number}").touch()
    (place / "gres.conf").write_text(f"NodeName=n[1-3] Name=gpu File={place}/gpu[0-3]\n", encoding="ascii")
    for name in ("state", "spool.n1", "spool.n2", "spool.n3"):
        (place / name).mkdir()
    key = place / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster = Cluster(place)
    files = {name: f"--{name}-file={place}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={place}/munge.socket", *files.values()],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"n{number}"] for number in (1, 2, 3)),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(_started(command, cluster))
            if command[0] == "munged":
                _wait_until((place / "munge.socket").exists, "munged's socket")
        _wait_until(lambda: _are_idle(cluster, 3), "three idle nodes")
        yield cluster
    finally:
        _end_jobs(cluster)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_block(size: int) -> int:
    """The first of some neighbouring ports that nobody listens on."""
    for first in range(18_000, 30_000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + size):
                stack.enter_context(contextlib.closing(socket.socket())).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def _started(command: list[str], cluster: Cluster) -> subprocess.Popen[bytes]:
    with (cluster.place / f"{'-'.join(command[:1] + command[3:4]).replace('/', '')[:40]}.out").open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _are_idle(cluster: Cluster, count: int) -> bool:
    command = ["sinfo", "--noheader", "--format=%D %T"]
    done = subprocess.run(
        command, env={**os.environ, **cluster.environment}, capture_output=True, text=True, check=False, timeout=30
    )
    return f"{count} idle" in done.stdout


def _end_jobs(cluster: Cluster) -> None:
    """Cancel what is left of jobs; daemons that cannot be asked any more are ended anyway."""
    environment = {**os.environ, **cluster.environment}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["scancel", "--user=root"], env=environment, check=False, capture_output=True, timeout=10)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            listed = subprocess.run(
                ["squeue", "--noheader"], env=environment, check=False, capture_output=True, timeout=10
            )
            if not listed.stdout.strip():
                return
            time.sleep(0.2)


def _wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {START_S:g} s"
        time.sleep(0.05)
