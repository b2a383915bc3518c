"""A real Slurm on this machine: five nodes, each a network namespace with its own address and host name.

Needs root, for namespaces and mounts, and the packages of tools/install_slurm.sh. If it cannot start, tests fail.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
BRIDGE = "br-slurm"
NETWORK = "10.77.0"
NODES = tuple(f"node{i}" for i in range(1, 6))

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
JobRequeue=1
BatchStartTimeout=10
{nodes}
PartitionName=left Nodes={left} MaxTime=INFINITE State=UP
PartitionName=right Nodes={right} MaxTime=INFINITE State=UP Default=YES
"""
LOCK = Path(
    "/tmp/spiral-mega-slurm-test.lock"
)  # names of the network and Slurm's ports exist only once per machine


class Cluster:
    """Slurm's daemons with their files in `folder`; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config), "PYTHONPATH": str(ROOT)}
        for name in [
            name
            for name in self.environment
            if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
        ]:
            del self.environment[name]

    def __enter__(self) -> Cluster:
        run([str(ROOT / "tools" / "install_slurm.sh")])
        self._lock = LOCK.open("a+")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.seek(0)
        if left := self._lock.read():  # by tests that were killed
            take_down(Path(left))
        self._lock.truncate(0)
        self._lock.write(str(self.folder))
        self._lock.flush()
        try:
            self._configure()
            self._start_network()
            self._start_daemons()
            self.wait_for(lambda: all(self.state(node) == "idle" for node in NODES), 60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every daemon and job, and take the network down."""
        subprocess.run(
            ["scancel", "-u", "root", "--signal=KILL"], env=self.environment, capture_output=True
        )
        take_down(self.folder)
        self._lock.truncate(0)
        self._lock.close()

    def run(self, *command: str) -> str:
        return run(list(command), env=self.environment)

    def start_node(self, node: str) -> None:
        script = (
            f"hostname {node}; mount --bind {self.folder}/hosts /etc/hosts; mount -t tmpfs none /sys/fs/cgroup; "
            f"mount -t tmpfs -o size=4g none /dev/shm; exec slurmd -N {node} -f {self.config}"
        )
        run(
            ["nsenter", f"--net=/run/netns/{node}", "unshare", "-m", "-u", "bash", "-c", script],
            env=self.environment,
        )

    def fill_shared_memory(self, node: str) -> None:
        """Leave no room in /dev/shm of `node`."""
        [slurmd] = pids_on(node)
        run(
            [
                "nsenter",
                "-t",
                str(slurmd),
                "-m",
                "mount",
                "-t",
                "tmpfs",
                "-o",
                "size=64k",
                "none",
                "/dev/shm",
            ]
        )

    def state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-N", "-n", node, "-o", "%t").split()[0]

    def job(self, number: str, field: str) -> str:
        """Return a field of `scontrol show job`, such as JobState."""
        words = self.run("scontrol", "show", "job", number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def wait_for(
        self, condition: Callable[[], bool], timeout: float, why: Callable[[], str] = lambda: ""
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                logs = "".join(
                    f"\n{path.name}: {path.read_text()[-1500:]}"
                    for path in self.folder.glob("*.log")
                )
                raise AssertionError(f"not within {timeout} s\n{why()}\n{logs}")
            time.sleep(0.2)

    def _configure(self) -> None:
        addresses = {node: f"{NETWORK}.{11 + i}" for i, node in enumerate(NODES)}
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address} CPUs=16" for node, address in addresses.items()
        )
        host = socket.gethostname().split(".")[0]
        self.config.write_text(
            SLURM_CONF.format(
                host=host,
                network=NETWORK,
                folder=self.folder,
                nodes=nodes,
                left=",".join(NODES[:2]),
                right=",".join(NODES[2:]),
            )
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [f"{address} {node}" for node, address in addresses.items()]
        (self.folder / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", f"{NETWORK}.1 {host}", *names]) + "\n"
        )
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()

    def _start_network(self) -> None:
        ip = lambda *words: run(["ip", *words])  # noqa: E731
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for i, node in enumerate(NODES):
            ip("netns", "add", node)
            ip("link", "add", f"sl-{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", f"sl-{node}", "master", BRIDGE, "up")
            ip("-n", node, "addr", "add", f"{NETWORK}.{11 + i}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")

    def _start_daemons(self) -> None:
        f = self.folder
        run(["munged", f"--key-file={f}/munge.key", f"--socket={f}/munge.socket", f"--pid-file={f}/munged.pid",
             f"--seed-file={f}/munge.seed", f"--log-file={f}/munged.log", "--force"])  # fmt: skip
        run(["slurmctld", "-f", str(self.config)], env=self.environment)
        for node in NODES:
            self.start_node(node)


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run `command` and return its output; fail with its output if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (
        f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids_on(node: str) -> list[int]:
    """Every process on `node`."""
    found = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def take_down(folder: Path) -> None:
    """End whatever a cluster with its files in `folder` has started."""
    for node in NODES:
        kill(pids_on(node))
    for daemon in ("slurmctld", "munged"):
        with suppress(OSError, ValueError):
            pid = int((folder / f"{daemon}.pid").read_text())
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill([pid])
    for (
        node
    ) in NODES:  # the link too: the namespace itself lasts as long as a process in it takes to die
        subprocess.run(["ip", "link", "delete", f"sl-{node}"], capture_output=True)
        subprocess.run(["ip", "netns", "delete", node], capture_output=True)
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
