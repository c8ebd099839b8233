"""One run of a job, from its start on the nodes to the delivery of its outputs."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pbs_standin.job import Job
from pbs_standin.moms import Moms, Task

PRIVATE = Path("/var/spool/pbs")
#: What tasks get as PATH: nothing of PBS, nothing of the user.
TASK_PATH = "/bin:/usr/bin"


@dataclass
class Settings:
    """What a test may change.

    Attributes:
        history: whether jobs are kept after their end (OpenPBS).
        operator: whether the user may rerun jobs.
        kill_delay: seconds from SIGTERM to SIGKILL.
        keep_completed: seconds that a job is shown after its end (Torque).
        node_down_after: seconds until the server takes note that a node is dead.
        requeue_timeout: seconds that `qrerun` waits for the end of the run.
        copy_retry: seconds that an output which cannot be delivered is tried again.
        scheduling: whether jobs are started.
        paused: whether the server is down for the commands.
    """

    history: bool = True
    operator: bool = False
    kill_delay: float = 10.0
    keep_completed: float = 300.0
    node_down_after: float = 1.0
    requeue_timeout: float = 45.0
    copy_retry: float = 1.0
    scheduling: bool = True
    paused: bool = False


@dataclass
class Run:
    """One run of a job.

    Attributes:
        spool, home: directories that all nodes see: of outputs, and of the user.
        ended: is set when all is done.
        dead: nodes of it that died; ``back`` is set when all of them are there again.
        over: what ends it beside its shell: ``rerun``, ``walltime``, ``node`` (its first node died).
    """

    job: Job
    moms: Moms
    settings: Settings
    spool: Path
    home: Path
    over: str = ""
    tasks: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    dead: set[str] = field(default_factory=set)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def first(self) -> str:
        """The node that the job's shell is on."""
        return self.job.hosts[0][0]

    async def go(self) -> None:
        """Run the job to its end; `job.exit_status` is set then."""
        job = self.job
        for node in job.nodes():
            await self.moms.ask(node, "begun", self._begin(node))
        shell = self.start(self.first, self._shell())
        await shell.started.wait()
        job.session, job.substate, job.changed = shell.process, 42, time.time()
        if job.walltime is not None:
            self._later(job.walltime, self._exceed)
        status = await shell.ended
        if self.dead and status is not None and not job.flavour.is_torque:
            await self.back.wait()
        for timer in self._timers:
            timer.cancel()
        if self.over == "rerun":
            status = -11
        elif self.over == "walltime":
            status = job.flavour.over_walltime
        if status is None:
            self.over, job.exit_status = "node", -20
        else:
            job.exit_status, job.substate = status, 51
            job.state = "E" if self.over != "rerun" else job.state
        await self.moms.end_all(job.id)
        await self._finish()

    # What is on the nodes

    def has_folders(self) -> bool:
        """Whether the outputs can be written where they are while it runs."""
        return all(Path(path).parent.is_dir() for path in self.outputs())

    def outputs(self) -> tuple[str, str]:
        """Return where stdout and stderr are written while the job runs."""
        job = self.job
        if job.terminal:
            return job.terminal, job.terminal
        kept, joined = job.options.get("-k", "n"), job.options.get("-j", "n")
        paths = []
        for letter, ending, target in (("o", "OU", job.outputs[0]), ("e", "ER", job.outputs[1])):
            path = self.spool / f"{job.id}.{ending}"
            if letter in kept and "d" in kept:
                path = Path(target.partition(":")[2])
                path = path / f"{job.id}.{ending}" if path.is_dir() else path
            elif letter in kept:
                path = self.home / Path(target.partition(":")[2]).name
            paths.append(str(path))
        out, err = paths
        return (out, out) if joined == "oe" else (err, err) if joined == "eo" else (out, err)

    def _begin(self, node: str) -> dict[str, Any]:
        is_first, job = node == self.first, self.job
        files = {}
        if is_first or not job.flavour.is_torque:
            files[self._nodefile] = "".join(f"{host}\n" for host in job.lines())
        if is_first:
            files[self._script] = job.wish.script
        if is_first and job.flavour.is_torque:
            files[f"{self._nodefile}gpu"] = self._cards()
        modes = {path: 0o700 if path == self._script else 0o644 for path in files}
        return {"do": "begin", "job": job.id, "files": files, "modes": modes, "scratch": self._scratch}

    @property
    def _nodefile(self) -> str:
        return str(PRIVATE / "aux" / self.job.id)

    @property
    def _script(self) -> str:
        return str(PRIVATE / "mom_priv" / "jobs" / f"{self.job.id}.SC")

    @property
    def _scratch(self) -> str:
        return str(PRIVATE / "tmp" / f"pbs.{self.job.id}")

    def _cards(self) -> str:
        pairs = zip(self.job.hosts, self.job.chunks, strict=True)
        cards = [(host, number) for (host, _), chunk in pairs for number in range(chunk.counted.get("ngpus", 0))]
        return "".join(f"{host}-gpu{number}\n" for host, number in cards)

    def _shell(self) -> dict[str, Any]:
        job = self.job
        if job.wish.program:
            program, *_ = args = job.wish.program
            return {"program": program, "args": args, "input": ""}
        program = job.options.get("-S", "/bin/bash")
        text = "" if job.terminal else f"{self._script}\n"
        return {"program": program, "args": [f"-{Path(program).name}"], "input": text}

    def start(self, node: str, order: dict[str, Any], line: int = 0) -> Task:
        """Start a task: the job's shell as the first, then those of pbsdsh, on a line of the nodefile."""
        self.tasks += 1
        out, err = self.outputs()
        streams = [self.job.terminal if self.job.terminal and self.tasks == 1 else "/dev/null", out, err]
        env = self.environment(node, line)
        return self.moms.start(node, self.job.id, {"streams": streams, "folder": str(self.home), "env": env, **order})

    def environment(self, node: str, line: int) -> dict[str, str]:
        """Return the environment of the task that is started now, on a line of the nodefile."""
        job, is_shell = self.job, self.tasks == 1
        number = job.nodes().index(node)
        env = {"PATH": TASK_PATH, "TZ": "UTC", "HOME": str(self.home), **job.variables}
        if is_shell:
            env |= {"SHELL": "/bin/bash", "USER": "root", "LOGNAME": "root"}
            env |= {"TERM": job.wish.call.env.get("TERM", "dumb")} if job.terminal else {}
        env |= {
            "ENVIRONMENT": "BATCH" if not job.terminal else "INTERACTIVE",
            "PBS_ENVIRONMENT": "PBS_INTERACTIVE" if job.terminal else "PBS_BATCH",
            "PBS_JOBID": job.id,
            "PBS_JOBNAME": job.name,
            "PBS_QUEUE": job.queue,
            "PBS_JOBCOOKIE": job.cookie,
            "PBS_MOMPORT": "15003",
            "PBS_NODENUM": str(number),
            "PBS_TASKNUM": "1" if is_shell else f"{number * 0x20000000 + self.tasks:08X}",
        }
        env |= self._of_torque(node, line) if job.flavour.is_torque else self._of_openpbs(node)
        # The real one tells the shell, and tasks on the other nodes.
        if is_shell or (number and not job.flavour.is_torque):
            env["PBS_NODEFILE"] = self._nodefile
        if job.terminal:
            env.pop("ENVIRONMENT")
        return env

    def _of_openpbs(self, node: str) -> dict[str, str]:
        job = self.job
        pairs = zip(job.hosts, job.chunks, strict=True)
        cores = next(chunk.counted["ncpus"] for (host, _), chunk in pairs if host == node)
        env = {"NCPUS": str(cores), "OMP_NUM_THREADS": str(cores)}
        env |= {"TMPDIR": self._scratch, "PBS_JOBDIR": str(self.home)}
        if job.index is not None:
            env |= {"PBS_ARRAY_INDEX": str(job.index), "PBS_ARRAY_ID": job.array}
        return env

    def _of_torque(self, node: str, line: int) -> dict[str, str]:
        job = self.job
        env = {
            "PBS_VNODENUM": str(line),
            "PBS_NUM_NODES": str(len(job.nodes())),
            "PBS_NUM_PPN": str(job.chunks[0].lines),
            "PBS_NP": str(len(job.lines())),
            "PBS_VERSION": "TORQUE-6.1.2",
            "PBS_SERVER": "pbsctl",
        }
        if node == self.first and self.tasks == 1:
            env["PBS_GPUFILE"] = f"{self._nodefile}gpu"
        if job.walltime is not None:
            env["PBS_WALLTIME"] = str(job.walltime)
        if job.index is not None:
            env["PBS_ARRAYID"] = str(job.index)
        return env

    # Its end

    def _later(self, seconds: float, what: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            what()

        self._timers.add(asyncio.get_running_loop().create_task(wait()))

    def terminate(self) -> None:
        """Have it end: SIGTERM to the tasks of its first node, SIGKILL later."""
        self.moms.signal(self.job.id, signal.SIGTERM, node=self.first, ending=True)
        self._later(self.settings.kill_delay, self.kill)

    def kill(self) -> None:
        """Have it end at once."""
        self.moms.signal(self.job.id, signal.SIGKILL, node=self.first)

    def say(self, words: str) -> None:
        """Say something at the end of the job's stderr, as the MOM."""
        with suppress(OSError), open(self.outputs()[1], "a") as stream:
            stream.write(f"{words}\n")

    def _exceed(self) -> None:
        if not self.over:
            self.over = "walltime"
            limit = self.job.walltime or 0
            self.say(f"=>> PBS: job killed: walltime {limit + 1} exceeded limit {limit}")
            self.terminate()

    async def _finish(self) -> None:
        """Have the nodes deliver its outputs, unless it shall run again, and forget it."""
        job = self.job
        for node in job.nodes():
            files = [self._nodefile, self._script, f"{self._nodefile}gpu"]
            deliver = self._deliveries() if node == self.first and self.over != "rerun" else []
            order = {"do": "finish", "job": job.id, "files": files, "scratch": self._scratch, "deliver": deliver}
            answer = await self.moms.ask(node, "finished", order)
            if answer and answer["failed"]:
                job.is_delivered = False
                await asyncio.sleep(self.settings.copy_retry)

    def _deliveries(self) -> list[list[str]]:
        """Return from where to where the outputs are copied."""
        here = {self.job.wish.call.host, "localhost", "pbsctl", self.first}
        found = []
        for ending, target in zip(("OU", "ER"), self.job.outputs, strict=True):
            source = self.spool / f"{self.job.id}.{ending}"
            host, _, path = target.partition(":")
            if source.exists():
                found.append([str(source), path if host in here else "/nonexistent/host"])
        return found

    def comment(self) -> str:
        """Return what the server says of its end."""
        begin = self.begun
        if self.over == "walltime":
            return f"{begin} and exceeded resource walltime"
        if self.job.terminated_by:
            return f"{begin} and terminated by {self.job.terminated_by}"
        return f"{begin} and {'failed' if self.job.exit_status else 'finished'}"

    @property
    def begun(self) -> str:
        """What the server says of its start."""
        stamp = time.strftime("%a %b %d at %H:%M", time.localtime(self.job.started))
        return f"Job run at {stamp} on {self.job.vnodes()}"
