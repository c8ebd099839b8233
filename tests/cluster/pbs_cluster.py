"""A cluster with PBS for tests: a real OpenPBS where this machine is part of one, or the stand-in on nodes of nodes.py.

The stand-in (pbs_standin) has the commands, a server on this machine, and a MOM on each of four nodes, with 8 CPUs,
4 GPUs and 8 GB by its count. All of it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from getpass import getuser
from pathlib import Path
from typing import Any, TypeVar

from cluster_tools import ClusterError, called, passwd_of_root, wait_until
from nodes import Command, Network, why_no_nodes

from allranks import contract
from waiting import PATIENCE

T = TypeVar("T")
HERE = Path(__file__).parent / "pbs_standin"
COMMANDS = ["qsub", "qstat", "qdel", "qrerun", "qhold", "qrls", "qalter", "pbsnodes", "pbsdsh"]
#: What nobody but the stand-in has there: the directory of the MOM, on each node its own.
NODE = """set -e
mount -t tmpfs tmpfs /var/spool
for folder in aux spool tmp mom_priv/jobs; do mkdir -p /var/spool/pbs/$folder; done
mount --bind "$1" /etc/passwd
# A real PBS has its commands in the PATH of each login.
[ ! -e /etc/profile.d/pbs.sh ] || mount --bind /dev/null /etc/profile.d/pbs.sh
"""


class PbsCluster:
    """A cluster with PBS, between ``start`` and ``stop``, or in a ``with``.

    Attributes:
        flavour: ``openpbs`` or ``torque``.
        is_real: whether it is no stand-in.
        nodes: names of its nodes, four at least.
        env: what the environment of its commands needs.
        environment: this process's environment with that.
    """

    def __init__(self, flavour: str, nodes: list[str], env: dict[str, str], *, is_real: bool) -> None:
        self.flavour, self.is_real, self.nodes, self.env = flavour, is_real, nodes, env
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PBS_")}
        self.environment = {**outside, **env}

    def __enter__(self) -> PbsCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bring it up, if it is not up anyway."""

    def stop(self) -> None:
        """Take it down, if it was brought up."""

    @property
    def finished(self) -> str:
        """The state of a job that has ended."""
        return "C" if self.flavour == "torque" else "F"

    def run(self, *command: str | Path, folder: Path | None = None, **options: Any) -> str:
        """Run a command such as qsub on this machine and return its stdout; raise with its words if it fails."""
        return called(command, cwd=folder, **{"env": self.environment, **options})

    def tried(self, *command: str | Path, folder: Path | None = None, **options: Any) -> tuple[int, str, str]:
        """Run a command on this machine, and return exit code, stdout and stderr."""
        given = {"cwd": folder, "env": self.environment, "capture_output": True, "text": True, **options}
        done = subprocess.run([*map(str, command)], **given)
        return done.returncode, done.stdout, done.stderr

    def qsub(self, *args: str | Path, folder: Path | None = None, **options: Any) -> str:
        """Submit a job, with qsub's own arguments, and return its id."""
        return self.run("qsub", *args, folder=folder, **options).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return all attributes of a job as `qstat -f` names them; none for one that is not known."""
        options = ["-f"] if self.flavour == "torque" else ["-x", "-f", "-w"]
        code, out, err = self.tried("qstat", *options, job)
        if "not configured to maintain job history" in err:
            code, out, err = self.tried("qstat", "-f", "-w", job)
        if code and "Unknown Job Id" not in err:
            raise ClusterError(f"qstat ended with {code}: {err.strip()}")
        lines = out.replace("\n\t", "").splitlines()
        return {name.strip(): value for name, equals, value in (line.partition(" = ") for line in lines) if equals}

    def wait_for_state(self, job: str, *states: str, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until a job is in one of the states, by default that of ended jobs, and return what is known of it."""
        wanted = states or (self.finished,)

        def reached() -> dict[str, str] | None:
            known = self.job(job)
            return known if known.get("job_state") in wanted else None

        return self.wait_until(f"job {job} to be {' or '.join(wanted)}", reached, seconds)

    def wait_until(self, what: str, done: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return what ``done`` gives as soon as it gives something; if it never does, raise with the queue's view."""
        try:
            return wait_until(what, done, seconds)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.tried('qstat', '-f')[1]}") from None

    def jobs(self) -> list[str]:
        """Return the user's jobs that have not ended, by their numbers."""
        rows = [line.split() for line in self.run("qstat").splitlines() if line[:1].isdigit()]
        own = [row[0].partition(".")[0] for row in rows if row[2] == getuser() and row[4] not in "CFX"]
        return [*dict.fromkeys(own)]

    def is_idle(self) -> bool:
        """Whether no job of the user is in the queue or on a node."""
        return not self.jobs()

    def reset(self) -> None:
        """End all jobs of the user, and wait until they have ended."""
        force = [] if self.flavour == "torque" else ["-W", "force"]
        for job in self.jobs():
            self.tried("qdel", *force, job)
        self.wait_until("the cluster to be idle", self.is_idle)


class RealPbs(PbsCluster):
    """The OpenPBS or PBS Pro whose commands are on this machine.

    Args:
        folder: where the tests are: ``reset`` ends the jobs that were submitted from there or below, and no others.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("openpbs", _free_nodes(), {"PATH": os.environ["PATH"], contract.WAITS: "1"}, is_real=True)
        self.folder = folder

    def jobs(self) -> list[str]:
        """Return the tests' jobs that have not ended, by their numbers."""
        below = f"PBS_O_WORKDIR={self.folder}/"
        return [job for job in super().jobs() if below in self.job(job).get("Variable_List", "")]

    def sees(self) -> bool:
        """Whether a node writes to the directory what this machine reads there."""
        seen = self.folder / "seen"
        job = self.qsub("-N", "seen", "-o", seen, "-j", "oe", "--", "/bin/echo", "here", folder=self.folder)
        self.wait_for_state(job)
        return seen.exists()


def _free_nodes() -> list[str]:
    """Return the free nodes of the real PBS; none where there is none."""
    if not shutil.which("qstat") or not shutil.which("pbsnodes"):
        return []
    version = subprocess.run(["qstat", "--version"], capture_output=True, text=True)
    if "pbs_version" not in version.stdout.lower():
        return []
    shown = subprocess.run(["pbsnodes", "-a", "-F", "json"], capture_output=True, text=True)
    nodes = json.loads(shown.stdout).get("nodes", {}) if shown.returncode == 0 else {}
    return sorted(name for name, node in nodes.items() if node["state"] == "free")


def has_real_pbs() -> bool:
    """Whether this machine is part of a real PBS with four free nodes at least."""
    return len(_free_nodes()) >= 4


class StandInPbs(PbsCluster):
    """The stand-in.

    Args:
        folder: gets all its files, also the users' home; to be removed by whoever gave it. A short path.
        flavour: ``openpbs`` or ``torque``.

    Attributes:
        network: its nodes without PBS.
        home: of the user on all nodes.
    """

    def __init__(self, folder: Path, flavour: str = "openpbs") -> None:
        self.folder = folder.resolve()
        self.bin, self.home = self.folder / "bin", self.folder / "home"
        names = [f"pbs{number:02}" for number in range(1, 5)]
        super().__init__(flavour, names, {"PATH": f"{self.bin}:{os.environ['PATH']}"}, is_real=False)
        self.network = Network(self.folder, names)
        self._server: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Bring it up, until all nodes are there; nothing of it is left running if that fails."""
        if why := why_no_nodes():
            raise ClusterError(why)
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._write_files()
            self.network.start()
            self._start_server()
            for name in self.nodes:
                self._start_mom(name)
            self._wait_for_nodes()
            undo.pop_all()

    def stop(self) -> None:
        """End all its processes and take its network away. The files stay."""
        if self._server:
            assert self._server.stdin and self._server.stdout
            self._server.stdin.close()
            self._server.wait(PATIENCE)
            self._server.stdout.close()
        self._server = None
        self.network.stop()

    def _write_files(self) -> None:
        for folder in (self.bin, self.home, self.folder / "spool"):
            folder.mkdir()
        text = (HERE / "client.py").read_text().replace('SOCKET = ""', f"SOCKET = {str(self.folder / 'socket')!r}")
        for name in [*COMMANDS, *([] if self.flavour == "torque" else ["pbs_tmrsh"])]:
            (self.bin / name).write_text(f"#!{sys.executable} -IS\n{text}")
            (self.bin / name).chmod(0o755)
        # As the admin of a real one has it for login shells.
        # PBS brings nothing of the caller's environment to a job, so short waits come from here too.
        (self.home / ".profile").write_text(f"PATH={self.bin}:$PATH\nexport {contract.WAITS}=0.1\n")
        (self.folder / "passwd").write_text(passwd_of_root(self.home))

    def _start_server(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, HERE / "server.py", self.folder, self.flavour, *self.nodes],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        assert self._server.stdout
        if self._server.stdout.readline() != "ready\n":
            raise ClusterError(f"the server did not start: {(self.folder / 'server.log').read_text()}")

    def _start_mom(self, name: str, *, is_new_node: bool = True) -> None:
        node = self.network.nodes[name]
        if is_new_node:
            node.run(["sh", "-c", NODE, "sh", self.folder / "passwd"])
        with (self.folder / f"{name}.log").open("ab") as log:
            mom: list[str | Path] = [sys.executable, "-IS", HERE / "mom.py", self.folder / "socket", name]
            node.popen(mom, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_for_nodes(self) -> None:
        def all_up() -> bool:
            assert self._server
            if self._server.poll() is not None:
                raise ClusterError(f"the server has ended: {(self.folder / 'server.log').read_text()}")
            return bool(self._switch()["up"] == self.nodes)

        wait_until("all nodes to be up", all_up)

    # Jobs

    def is_idle(self) -> bool:
        """Whether no job of the user is in the queue or on a node."""
        return super().is_idle() and not self._switch()["running"]

    def run_on(self, node: str, command: Command, folder: str | Path = "/", **options: Any) -> str:
        """Run a command on a node and return its stdout; raise if it fails."""
        return self.network.nodes[node].run(command, folder, **{"env": self.environment, **options})

    def processes(self, node: str) -> dict[int, str]:
        """Return what lives on a node besides the stand-in itself: process id as this machine counts, command line."""
        return {pid: words for pid, words in self._all_on(node).items() if "mom.py" not in words}

    def _all_on(self, node: str) -> dict[int, str]:
        found = {}
        namespace = Path(f"/proc/{self.network.nodes[node].pid}/ns/pid").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if (entry / "ns" / "pid").readlink() == namespace and words:
                    found[int(entry.name)] = words
        found.pop(self.network.nodes[node].pid, None)
        return found

    # Switches

    def _switch(self, **settings: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self.folder / "socket"))
            server.sendall(json.dumps({"switch": settings}).encode() + b"\n")
            answer: dict[str, Any] = json.load(server.makefile())
        return answer

    def set(self, **settings: Any) -> None:
        """Set what ``Settings`` of pbs_standin.running names, until ``reset``."""
        self._switch(**settings)

    def fail_next(self, command: str, times: int = 1, words: str = "", code: int = 1) -> None:
        """Have the next calls of a command do nothing but say words on stderr and end with a code."""
        self._switch(fail=[command, times, words or f"{command}: End of File", code])

    def pause_server(self) -> None:
        """Have the server be down for all commands but those inside of jobs. Jobs run on."""
        self.set(paused=True)

    def resume_server(self) -> None:
        """Have it be there again."""
        self.set(paused=False)

    def kill_node(self, name: str) -> None:
        """End a node as a power failure does: all its processes are gone, and its peers are not told."""
        self.network.kill(name)

    def start_node(self, name: str) -> None:
        """Start a killed node again, with its MOM; return when the server knows it."""
        self.network.start_nodes([name])
        self._start_mom(name)
        self._wait_for_nodes()

    def kill_mom(self, name: str) -> None:
        """Kill the MOM of a node as `kill -9` does: its tasks run on, and it knows none of them when it is back."""
        for pid, words in self._all_on(name).items():
            if "mom.py" in words:
                os.kill(pid, 9)
        self.wait_until("the end of the MOM", lambda: not self.has_mom(name))

    def has_mom(self, name: str) -> bool:
        """Whether a node that is alive has a MOM."""
        return any("mom.py" in words for words in self._all_on(name).values())

    def start_mom(self, name: str) -> None:
        """Start the MOM of a node again; return when the server knows it."""
        self._start_mom(name, is_new_node=False)
        self._wait_for_nodes()

    def reset(self) -> None:
        """Undo all switches, end all jobs, start what is dead, and end what jobs have left behind."""
        self._switch(reset=True)
        for name in self.nodes:
            if not self.network.nodes[name].is_alive:
                self.start_node(name)
            elif not self.has_mom(name):
                self.start_mom(name)
            self.network.mend(name)
        super().reset()
        for name in self.nodes:
            for process in self.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(process, 9)
            wait_until(f"the end of what is left on {name}", partial(self._is_clean, name))
        self._wait_for_nodes()

    def _is_clean(self, name: str) -> bool:
        return not self.processes(name)
