"""The MOM of one node: starts tasks in sessions of their own, signals sessions, and says when a task has ended.

`python -IS mom.py SOCKET NAME`, in the node's namespaces; ends with the server. A task is known by a number that the
server gives; a job by its id. As the real one, it knows processes by their session alone: what has left the session of
its task gets no signals, and survives the job.
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
from fcntl import ioctl
from pathlib import Path
from typing import Any

TIOCSCTTY = 0x540E


class Mom:
    """What one node does.

    Attributes:
        tasks: by the process that leads its session: the number of the task, and the job.
        orphans: sessions whose leader has ended in a job that is being ended, with the leader's exit status.
        ending: jobs that are being ended: a task of them lasts as long as anything in its session does.
    """

    def __init__(self, path: str, name: str) -> None:
        self.tasks: dict[int, tuple[int, str]] = {}
        self.orphans: dict[int, int] = {}
        self.ending: set[str] = set()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.connect(path)
        self.tell({"mom": name})

    def tell(self, message: dict[str, Any]) -> None:
        """Send the server a message."""
        self.server.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> None:
        """Do what the server says until it has ended."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        rest = b""
        while True:
            ready, _, _ = select.select([self.server, woken], [], [], 0.1 if self.orphans else None)
            if woken in ready:
                os.read(woken, 4096)
            if self.server in ready:
                data = self.server.recv(1 << 20)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.do(json.loads(line))
            self.reap()

    def do(self, order: dict[str, Any]) -> None:
        """Carry out one order."""
        if order["do"] == "start":
            self.start(order)
        elif order["do"] == "signal":
            self.signal(order)
        elif order["do"] == "begin":
            for path, text in order["files"].items():
                Path(path).write_text(text, errors="surrogateescape")
                Path(path).chmod(order["modes"][path])
            Path(order["scratch"]).mkdir(exist_ok=True)
            self.tell({"begun": order["job"]})
        elif order["do"] == "finish":
            self.finish(order)

    def finish(self, order: dict[str, Any]) -> None:
        """Deliver the outputs of a job, and remove what it had here."""
        self.ending.discard(order["job"])
        failed = [target for source, target in order["deliver"] if not delivered(source, target)]
        for path in order["files"]:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(order["scratch"], ignore_errors=True)
        self.tell({"finished": order["job"], "failed": failed})

    def start(self, order: dict[str, Any]) -> None:
        """Start a task."""
        process = os.fork()
        if process == 0:
            become(order)
        self.tasks[process] = (order["task"], order["job"])
        self.tell({"started": order["task"], "process": process})

    def signal(self, order: dict[str, Any]) -> None:
        """Signal everything in the sessions of a job's tasks, or of one task; all of them are over if it is SIGKILL."""
        job, number = order["job"], order["signal"]
        if order["ending"]:
            self.ending.add(job)
        for leader, (task, owner) in [*self.tasks.items()]:
            if owner == job and order["task"] in (None, task):
                kill_session(leader, number)
        if number == signal.SIGKILL:
            self.ending.discard(job)

    def reap(self) -> None:
        """Say which tasks have ended, and end the rest of their sessions."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if process == 0:
                break
            self.orphans[process] = status
        for process in [*self.orphans]:
            task, job = self.tasks[process]
            if job in self.ending and session(process):
                continue
            kill_session(process, signal.SIGKILL)
            status = self.orphans.pop(process)
            del self.tasks[process]
            code = os.waitstatus_to_exitcode(status)
            self.tell({"ended": task, "job": job, "status": code if code >= 0 else 256 - code})


def become(order: dict[str, Any]) -> None:
    """Be the task, in a child."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.umask(0o077)
        for target, path, flags in zip(
            (0, 1, 2), order["streams"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True
        ):
            is_terminal = path.startswith("/dev/pts/")
            source = given(order["input"]) if target == 0 and order["input"] else 0
            source = source or os.open(path, os.O_RDWR if is_terminal else flags | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(source, target)
            if is_terminal and target == 0:
                ioctl(0, TIOCSCTTY, 0)
        os.closerange(3, 1024)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["env"])
        os.execvpe(order["program"], order["args"], order["env"])
    except OSError as error:
        os.write(2, f"{order['args'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(254)


def given(text: str) -> int:
    """Return a pipe that a short text comes from."""
    source, target = os.pipe()
    os.write(target, text.encode())
    os.close(target)
    return source


def session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == leader and state not in (b"Z", b"X"):
            found.append(int(entry.name))
    return found


def kill_session(leader: int, number: int) -> None:
    """Signal all processes of a session, the youngest first, so that children hear of it before their parents."""
    for process in sorted(session(leader), reverse=True):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass


def delivered(source: str, target: str) -> bool:
    """Copy an output to where it is wanted, as cp does: over what is there, into a directory by its own name."""
    try:
        shutil.copyfile(source, Path(target, Path(source).name) if Path(target).is_dir() else target)
    except OSError:
        return False
    finally:
        Path(source).unlink()
    return True


if __name__ == "__main__":
    os.umask(0o077)
    Mom(*sys.argv[1:]).serve()
