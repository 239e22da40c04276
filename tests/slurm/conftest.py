"""A real SLURM on this machine: munge, slurmctld and two slurmd (nodes n1 and n2), all on loopback."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multicls.files import REPOSITORY
from tests.data_prep.conftest import tiny_tokenizer  # noqa: F401  (a fixture)
from tests.finetune.conftest import glue  # noqa: F401  (a fixture)
from tests.pretrain.conftest import tiny_run  # noqa: F401  (a fixture)
from tests.processes import completed, free_ports, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=5
SlurmdTimeout=10
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=16000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=16000 Gres=gpu:2
GresTypes=gpu
PartitionName=all Nodes=n1,n2 Default=YES
"""


class Cluster:
    """The running SLURM; `folder` has its configuration, state and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Runs a command of SLURM; returns what it prints."""
        done = completed(command, cwd=cwd or self.folder, env=self.environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *arguments: str, cwd: Path, options: tuple[str, ...] = ()) -> str:
        """Submits a script of slurm/ from `cwd`, which looks like the repository; returns the job's id."""
        for name in ("pretrain", "finetune", "slurm"):
            if not (cwd / name).exists():
                (cwd / name).symlink_to(REPOSITORY / name)
        for node in ("n1", "n2"):  # a slurmd may hang after a step whose processes were killed
            if "State=DOWN" in self.run("scontrol", "show", "node", node):
                self.daemons[node].kill()
                self.daemons[node].wait()
                self.start_node(node)
        return self.run("sbatch", "--parsable", *options, f"slurm/{script}", *arguments, cwd=cwd)

    def job(self, job: str) -> dict[str, str]:
        """Returns SLURM's record of a job: JobState, ExitCode, Restarts, Reason ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str) -> dict[str, str]:
        """Returns SLURM's record of a job when it has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.job(job)["JobState"] in ended, lambda: str(self.job(job)))
        return self.job(job)

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Starts a daemon that stays in the foreground."""
        with open(self.folder / f"{name}.out", "ab") as log:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            options |= {"env": self.environment | environment, "start_new_session": True}
            self.daemons[name] = subprocess.Popen(command, **options)

    def start_node(self, name: str) -> None:
        """Starts the slurmd of n1 or n2; its processes carry the node's name."""
        conf = str(self.folder / "slurm.conf")
        self.start(name, "slurmd", "-D", "-N", name, "-f", conf, SLURMD_NODENAME=name)

    def fail_node(self, name: str) -> None:
        """Ends everything on a node at once, as when the machine fails."""
        here = processes(name)
        for number in sorted(here, key=lambda number: not here[number].startswith("slurm")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.daemons[name].wait()

    def stop(self) -> None:
        """Ends jobs and daemons."""
        cancel = ["scancel", "--signal=KILL", "--full", "--user=root"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(cancel, env=self.environment, check=False, timeout=30)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def processes(node: str = "") -> dict[int, str]:
    """Returns the command lines of all processes of jobs and nodes, or of those on one node, by process id."""
    found, name = {}, f"\0SLURMD_NODENAME={node}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has ended
            if name in b"\0" + (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().split(b"\0")
                found[int(process.name)] = b" ".join(words).decode()
    return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, idle."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"needs SLURM and root; not installed: {', '.join(missing) or 'nothing'}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    # devices that stand for GPUs
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    conf = SLURM_CONF.format(folder=folder, host=socket.gethostname(), ports=free_ports(3))
    (folder / "slurm.conf").write_text(conf)
    cluster = Cluster(folder)
    names = {"socket": "sock", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    munge = [f"--{option}={folder / 'munge'}.{suffix}" for option, suffix in names.items()]
    try:
        cluster.start("munged", "munged", "--foreground", "--force", *munge)
        until((folder / "munge.sock").exists, (folder / "munged.out").read_text)
        cluster.start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in ("n1", "n2"):
            cluster.start_node(name)
        until((folder / "slurmctld.pid").exists, (folder / "slurmctld.log").read_text)
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        until(lambda: cluster.run(*idle) == "2", (folder / "slurmctld.log").read_text)
        yield cluster
    finally:
        cluster.stop()
