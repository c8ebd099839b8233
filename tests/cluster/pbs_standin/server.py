"""The server of the stand-in: `python server.py FOLDER FLAVOUR NODE…`, until its stdin ends.

In FOLDER: ``socket``, which commands, MOMs and tests connect to; ``spool``; ``home``, the user's on all nodes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pbs_standin.commands import COMMANDS
from pbs_standin.job import Job
from pbs_standin.moms import Moms
from pbs_standin.resources import Node, never, placed
from pbs_standin.running import Run, Settings
from pbs_standin.shown import as_json
from pbs_standin.submission import Call
from pbs_standin.words import FLAVOURS, RefusedError

#: Commands that ask a MOM, not the server.
OF_MOM = {"pbsdsh", "pbs_tmrsh"}
CONNECT = "cannot connect to server pbsctl (errno=15010)"
LIMIT = 1 << 26


class Conversation:
    """One command, from its call to its exit code."""

    def __init__(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.call, self._reader, self._writer = call, reader, writer

    def send(self, **message: Any) -> None:
        """Send the command something."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def out(self, text: str) -> None:
        """Have it say something on stdout."""
        self.send(out=text)

    def refuse(self, error: RefusedError) -> int:
        """Have it say why on stderr, and return the exit code."""
        self.send(err=f"{self.call.command}: {error.words}\n")
        return error.code

    async def ask(self, *what: str) -> dict[str, Any]:
        """Ask it for something, and return the answer."""
        self.send(ask=what)
        return await self.hear() or {}

    async def hear(self) -> dict[str, Any] | None:
        """Return what it says next; None when it has ended."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None


class Server:
    """The queue, and all that happens to it."""

    def __init__(self, folder: Path, flavour: str, names: list[str]) -> None:
        self.folder, self.flavour = folder, FLAVOURS[flavour]
        self.settings = Settings()
        self.nodes = [Node(name, is_up=False) for name in names]
        self.queues: dict[str, dict[str, str]] = {"workq": {}, "gpuq": {"walltime": "02:00:00"}, "closedq": {}}
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, Run] = {}
        self.failing: dict[str, list[RefusedError]] = {}
        self.moms = Moms(self._lost, self._found)
        self.changed = asyncio.Condition()
        self._number = 0
        self._kept: set[asyncio.Task[Any]] = set()

    def new_number(self) -> int:
        """Return the number of the next job."""
        self._number += 1
        return self._number

    def later(self, work: Any) -> None:
        """Let a coroutine run."""
        task = asyncio.get_running_loop().create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    # Connections

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a MOM, a test's switch, or a command."""
        first = json.loads(await reader.readline() or "{}")
        try:
            if "mom" in first:
                await self.moms.serve(first["mom"], reader, writer)
            elif "switch" in first:
                writer.write(json.dumps(self.switch(**first["switch"])).encode())
            elif first:
                talk = Conversation(Call(**first), reader, writer)
                talk.send(code=await self._answer(talk))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(self, talk: Conversation) -> int:
        command = talk.call.command
        if self.settings.paused and command not in OF_MOM and talk.call.args != ["--version"]:
            if command == "qstat" and "json" in talk.call.args:
                talk.out(as_json("Jobs", {}))
            talk.send(err=f"Connection refused\n{command}: {CONNECT}\n")
            return 162 if command == "qsub" else 255
        if self.failing.get(command):
            error = self.failing[command].pop(0)
            talk.send(err=f"{error.words}\n")
            return error.code
        try:
            return await COMMANDS[command](self, talk)
        except RefusedError as error:
            return talk.refuse(error)

    def switch(self, fail: list[Any] | None = None, reset: bool = False, **settings: Any) -> dict[str, Any]:
        """Change settings, have calls fail, or undo all that; return what a test asks for."""
        if reset:
            vars(self.settings).update(vars(Settings()))
            self.failing.clear()
        if fail:
            command, times, words, code = fail
            self.failing.setdefault(command, []).extend([RefusedError(words, code)] * times)
        for name, value in settings.items():
            setattr(self.settings, name, value)
        self.schedule()
        return {"up": [node.name for node in self.nodes if node.is_up], "running": [*self.runs]}

    # Jobs

    def schedule(self) -> None:
        """Start all jobs that can be started now, in the order of their submission."""
        if self.settings.paused or not self.settings.scheduling:
            return
        for job in [*self.jobs.values()]:
            if job.state != "Q" or job.is_array or not self._may_run(job):
                continue
            if why := never(job.chunks, job.place, self.nodes):
                job.comment = f"Can Never Run: {why}"
                continue
            given = placed(job.id, job.chunks, job.place, self.nodes)
            if isinstance(given, str):
                job.comment = f"Not Running: {given}"
                continue
            job.hosts = [(node.name, slot) for node, slot in given]
            self._begin(job)
            if self.runs[job.id].has_folders():
                self.later(self._run(job))
            else:
                self._give_up(job)

    def _may_run(self, job: Job) -> bool:
        """Whether its array lets it run now."""
        if not job.array:
            return True
        _, _, most = self.jobs[job.array].options.get("-J", self.jobs[job.array].options.get("-t", "")).partition("%")
        running = [other for other in self.children(job.array) if other.state in "RE"]
        return not most or len(running) < int(most)

    def _begin(self, job: Job) -> None:
        job.state, job.substate, job.run_count = "R", 41, job.run_count + 1
        job.started, job.ended, job.session, job.terminated_by = time.time(), 0.0, 0, ""
        run = Run(job, self.moms, self.settings, self.folder / "spool", self.folder / "home")
        self.runs[job.id] = run
        job.comment = run.begun
        if (array := self.jobs.get(job.array)) and array.state == "Q":
            array.state, array.substate, array.started = "B", 70, time.time()
            array.comment = f"Job Array Began at {time.strftime('%a %b %d at %H:%M')}"

    def _give_up(self, job: Job) -> None:
        """Hold a job that no node can start."""
        del self.runs[job.id]
        for node in self.nodes:
            node.release(job.id)
        job.state, job.substate, job.holds, job.hosts = "H", 20, {"s"}, []
        job.comment, job.exit_status, job.run_count = "job held, too many failed attempts to run", -3, 21

    async def _run(self, job: Job) -> None:
        run = self.runs[job.id]
        await self._noted()
        await run.go()
        if run.over == "node":
            await self._take_note(run.first)
        del self.runs[job.id]
        run.ended.set()
        for node in self.nodes:
            node.release(job.id)
        if run.over == "rerun" or (run.over == "node" and job.is_rerunnable):
            job.state, job.substate, job.hosts, job.session = "Q", 10, [], 0
            job.comment, job.changed = "", time.time()
        else:
            job.comment = run.comment()
            self.end(job, 91 if job.terminated_by else 93 if job.exit_status else 92)
        self.schedule()
        await self._noted()

    async def _noted(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def end(self, job: Job, substate: int = 91) -> None:
        """Put a job into its last state, and free or end those that wait for it."""
        job.state, job.substate, job.ended, job.changed = self.flavour.finished, substate, time.time(), time.time()
        for other in self.jobs.values():
            # What waits for a job that never ran waits forever.
            if job.run_count and any(waited == job.id for _, waited in other.depend) and not other.is_over:
                self.settle(other)
        if job.array:
            job.state = "X" if not self.flavour.is_torque else job.state
            children = self.children(job.array)
            if all(child.is_over for child in children):
                array = self.jobs[job.array]
                array.exit_status = int(any(child.exit_status for child in children))
                for child in children:
                    child.state = self.flavour.finished
                self.end(array)
        if self.flavour.is_torque:
            self.later(self._forget(job))
        self.later(self._noted())

    async def _forget(self, job: Job) -> None:
        await asyncio.sleep(self.settings.keep_completed)
        self.jobs.pop(job.id, None)

    def settle(self, job: Job) -> None:
        """Free a job whose dependencies are met; end one for which one can never be."""
        for kind, waited in [*job.depend]:
            other = self.jobs.get(waited)
            if other and not other.is_over:
                continue
            if other and _is_met(kind, other):
                job.depend.remove((kind, waited))
            else:
                self.end(job, 92)
                return
        if not job.depend and "s" in job.holds:
            job.holds.discard("s")
            self.unhold(job)

    def unhold(self, job: Job) -> None:
        """Let a job run on which no hold is left."""
        if job.state == "H" and not job.holds:
            job.state, job.substate = "Q", 10
            for child in self.children(job.id):
                child.state, child.substate = "Q", 10
        self.schedule()

    def children(self, array: str) -> list[Job]:
        """Return the jobs of an array."""
        return [job for job in self.jobs.values() if job.array == array]

    # Nodes

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def _found(self, name: str) -> None:
        self._node(name).is_up = True
        for run in self.runs.values():
            if name in run.dead:
                run.dead.discard(name)
                self._end_for(run, name)
                run.back.set()
        self.schedule()

    def _lost(self, name: str) -> None:
        for run in self.runs.values():
            if name in run.job.nodes()[1:]:
                run.dead.add(name)
        self.later(self._take_note(name))

    def _end_for(self, run: Run, name: str) -> None:
        """Have the first node of a job end it, because another node of it died."""
        number = run.job.nodes().index(name)
        run.say(f"=>> PBS: job killed: node {number} ({name}) requested job die, code 15009")
        run.terminate()

    async def _take_note(self, name: str) -> None:
        """Take note that a node is dead. Torque ends its jobs then; OpenPBS only when it is there again."""
        await asyncio.sleep(self.settings.node_down_after)
        self._node(name).is_up = self.moms.is_alive(name)
        if self.flavour.is_torque:
            for run in self.runs.values():
                if name in run.dead:
                    run.dead.discard(name)
                    self._end_for(run, name)


def _is_met(kind: str, other: Job) -> bool:
    if other.exit_status is None:
        return kind in ("afterany", "after")
    return kind in ("afterany", "after") or (kind == "afterok") == (other.exit_status == 0)


async def serve(folder: Path, flavour: str, names: list[str]) -> None:
    """Serve until stdin ends."""
    server = Server(folder, flavour, names)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: traceback.print_exception(context.get("exception")))
    listening = await asyncio.start_unix_server(server.connected, folder / "socket", limit=LIMIT, backlog=1000)
    print("ready", flush=True)
    async with listening:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
