"""A SLURM of one node on this machine, from Debian's packages slurmctld, slurmd and munge, in a folder of its own.

``python tests/cluster/slurm.py COMMAND…`` runs a command with it; the daemons end with the command.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
READY_S = 300  # a machine with other work starts daemons slowly
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
KillWait=20
MinJobAge=300
MessageTimeout=60
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=off MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no SLURM here, as one line; empty when there can."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in DAEMONS if not shutil.which(name, path=path)]
    return f"{', '.join(absent)} not found; apt-get install slurmctld slurmd slurm-client munge" if absent else ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class OneNodeSlurm:
    """The three daemons as children of this process; a context manager.

    Attributes: ``environment``, what a command needs to speak to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += ":/usr/sbin:/sbin"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OneNodeSlurm:
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir(parents=True)
        host, user = socket.gethostname().split(".")[0], subprocess.getoutput("id -un")
        ports = {"controller_port": free_port(), "node_port": free_port()}
        config = CONFIG.format(folder=self.folder, host=host, user=user, cpus=os.cpu_count(), **ports)
        (self.folder / "slurm.conf").write_text(config)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"key": key, "socket": self.folder / "munge.socket"}
        files |= {name: self.folder / "munge" / name for name in ("pid", "log", "seed")}
        named = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        self._start("munged", "--foreground", "--force", *(f"--{named[name]}={path}" for name, path in files.items()))
        self._wait_for(lambda: files["socket"].exists())
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", host)
        self._wait_for(lambda: self.answer("sinfo", "-h", "-o", "%T").split()[:1] == ["idle"])
        return self

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as out:
            daemon = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
        self.daemons.append(daemon)

    def _wait_for(self, ready: object) -> None:
        end = time.monotonic() + READY_S
        while not ready():  # type: ignore[operator]
            for daemon in self.daemons:
                if daemon.poll() is not None:
                    name = str(daemon.args[0])  # type: ignore[index]
                    raise RuntimeError(f"{name} ended: {(self.folder / f'{name}.out').read_text()[-2000:]}")
            if time.monotonic() > end:
                log = (self.folder / "slurmctld.log").read_text()
                raise RuntimeError(f"SLURM is not ready after {READY_S} s: {log[-2000:]}")
            time.sleep(0.2)

    def answer(self, *command: str) -> str:
        """What a command of SLURM prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300).stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answer("scancel", "--full", "--signal=KILL", "--state=RUNNING")
        self.answer("scancel", "--state=PENDING")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons end with this process
    with tempfile.TemporaryDirectory() as folder, OneNodeSlurm(Path(folder)) as slurm:
        sys.exit(subprocess.run(sys.argv[1:], env=slurm.environment).returncode)
