"""`pbsdsh` and `pbs_tmrsh`: tasks on the nodes of the job that calls them."""

from __future__ import annotations

import asyncio
import getopt
from typing import TYPE_CHECKING, Any

from pbs_standin.moms import Task
from pbs_standin.running import Run
from pbs_standin.words import RefusedError

if TYPE_CHECKING:
    from pbs_standin.server import Conversation, Server

USAGE = """\
Usage: {0} [-c copies][-s][-v][-o] -- program [args...]
       {0} [-n node_index][-s][-v][-o] -- program [args...]"""
TMRSH_USAGE = "usage: {0} [-n][-l username] host [-n][-l username] command"


def _run(server: Server, talk: Conversation, code: int) -> Run:
    """Return the run of the job that a command is called in; it must know the job's cookie."""
    env = talk.call.env
    if "PBS_ENVIRONMENT" not in env:
        raise RefusedError("not executing under PBS", code)
    run = server.runs.get(env.get("PBS_JOBID", ""))
    is_inside = run and run.job.cookie == env.get("PBS_JOBCOOKIE") and talk.call.host in run.job.nodes()
    if run is None or not is_inside:
        raise RefusedError("tm_init failed, rc = TM_ESYSTEM (17000)", code)
    return run


def _start(run: Run, line: int, args: list[str]) -> Task:
    return run.start(run.job.lines()[line], {"program": args[0], "args": args, "input": ""}, line)


async def pbsdsh(server: Server, talk: Conversation) -> int:
    """Run a program on the lines of the nodefile. What becomes of the tasks is said, and no exit code tells it."""
    name = talk.call.path
    try:
        given, args = getopt.getopt(talk.call.args, "c:n:svo" if not server.flavour.is_torque else "c:n:h:osuveE")
        options = dict(given)
        numbers: dict[str, int] = {letter: int(options[letter]) for letter in ("-c", "-n") if letter in options}
    except (getopt.GetoptError, ValueError):
        numbers, args = {}, []
    if not args or len(numbers) > 1:
        talk.send(err=USAGE.format(name) + "\n")
        return 1
    run = _run(server, talk, 1)
    lines = _lines(run, options, numbers)
    if lines is None:
        talk.send(err=f"{name}: host {options['-h']} not found\n")
        return 1
    tasks = []
    for line in lines:
        tasks.append(_start(run, line, args))
        if "-s" in options:
            await tasks[-1].ended
    if "-o" in options and not server.flavour.is_torque:
        return 0
    return await _waited(run, talk, tasks, is_verbose="-v" in options)


def _lines(run: Run, options: dict[str, str], numbers: dict[str, int]) -> list[int] | None:
    hosts = run.job.lines()
    if "-n" in numbers:
        return [numbers["-n"] % len(hosts)]
    if "-c" in numbers:
        return [number % len(hosts) for number in range(numbers["-c"])]
    if "-h" in options:
        return [hosts.index(options["-h"])] if options["-h"] in hosts else None
    if "-u" in options:
        return [hosts.index(host) for host in dict.fromkeys(hosts)]
    return [*range(len(hosts))]


async def _waited(run: Run, talk: Conversation, tasks: list[Task], *, is_verbose: bool) -> int:
    """Wait for the tasks; kill them and return 1 when the command is told to end."""
    told: asyncio.Task[dict[str, Any] | None] = asyncio.ensure_future(talk.hear())
    left = {asyncio.ensure_future(_status(run, task)): (number, task) for number, task in enumerate(tasks)}
    while left:
        waited: set[asyncio.Future[Any]] = {*left, told}
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if told in done:
            if message := told.result():
                for _, task in left.values():
                    talk.out(f"pbsdsh: killing task 0x{task.number:08X} signal {message['signal']}\n")
                    run.moms.signal(run.job.id, message["signal"], node=task.node, task=task.number)
            return 1
        for ended in [future for future in left if future in done]:
            number, _ = left.pop(ended)
            status = ended.result()
            if status is None:
                talk.send(err=f"{talk.call.path}: Event poll failed, error TM_ENOTCONNECTED\n")
                return 2
            if status or is_verbose:
                talk.out(f"{talk.call.path}: task 0x{number:08X} exit status {status}\n")
    told.cancel()
    return 0


async def _status(run: Run, task: Task) -> int | None:
    """Return how a task has ended; as seen on a real one, of a node whose MOM died nothing is heard any more.

    Not even when the MOM is back: the first node's then ends the job, and waits for no task of the other.
    """
    status = await task.ended
    if status is None and not run.job.flavour.is_torque:
        await run.ended.wait()
    return status


async def pbs_tmrsh(server: Server, talk: Conversation) -> int:
    """Run a program on a host of the job, and end with its exit code."""
    name, args, host = talk.call.path, [*talk.call.args], ""
    while args and (args[0].startswith("-") or not host):
        word = args.pop(0)
        if word == "-l":
            args = args[1:]
        elif not word.startswith("-"):
            host = word
        elif word != "-n" and not word.startswith("-l"):
            args = []
    if not args or not host:
        talk.send(err=TMRSH_USAGE.format(name) + "\n")
        return 255
    run = _run(server, talk, 255)
    if "PBS_NODEFILE" not in talk.call.env:
        raise RefusedError("cannot find PBS_NODEFILE", 255)
    if host not in run.job.lines():
        talk.send(err=f'{name}: host "{host}" is not a node in job <{run.job.id}>\n')
        return 255
    status = await _status(run, _start(run, run.job.lines().index(host), args))
    return 255 if status is None else min(status, 254)
