"""What each command does, as the server sees it."""

from __future__ import annotations

import asyncio
import getopt
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from pbs_standin import shown
from pbs_standin.queue_job import qsub
from pbs_standin.tasks import pbs_tmrsh, pbsdsh
from pbs_standin.words import SERVER, Flavour, RefusedError

if TYPE_CHECKING:
    from pbs_standin.job import Job
    from pbs_standin.running import Run
    from pbs_standin.server import Conversation, Server

ID = re.compile(r"(\d+(?:\[\d*\])?)(?:\.([\w.-]+))?$")
QSTAT_OPTIONS = {"openpbs": "fxF:twu:QBJHaans1", "torque": "fxtu:QBanqrs1e"}
NO_HISTORY = "PBS is not configured to maintain job history"


def _options(talk: Conversation, letters: str) -> tuple[dict[str, str], list[str]]:
    try:
        given, rest = getopt.gnu_getopt(talk.call.args, letters)
    except getopt.GetoptError as error:
        name = talk.call.command
        raise RefusedError(f"invalid option -- '{error.opt}'\nusage: {name} [options] job_identifier...", 2) from None
    return dict(given), rest


def _said_version(talk: Conversation, flavour: Flavour) -> bool:
    if talk.call.args != ["--version"]:
        return False
    if flavour.is_torque:
        talk.send(err=f"{flavour.version}\n")
    else:
        talk.out(f"{flavour.version}\n")
    return True


def found(server: Server, given: str) -> Job:
    """Return a job by its id, with or without the server's name."""
    parts = ID.match(given)
    if not parts or parts[2] not in (None, SERVER):
        raise RefusedError(f"illegally formed job identifier: {given}", 1)
    name = f"{parts[1]}.{SERVER}"
    job = server.jobs.get(name)
    if job is None or (job.is_past and not server.settings.history):
        raise server.flavour.no_job(name)
    return job


async def for_each(talk: Conversation, ids: list[str], work: Callable[[str], Any]) -> int:
    """Do something for each id; the exit code is the last refusal's."""
    if not ids:
        raise RefusedError(f"usage: {talk.call.command} job_identifier...", 2)
    code = 0
    for given in ids:
        try:
            work(given)
        except RefusedError as error:
            code = talk.refuse(error)
    return code


async def qstat(server: Server, talk: Conversation) -> int:
    """Show jobs, queues or the server."""
    flavour = server.flavour
    if _said_version(talk, flavour):
        return 0
    options, ids = _options(talk, QSTAT_OPTIONS[flavour.name])
    if options.get("-F", "json") not in ("json", "dsv"):
        raise RefusedError("usage: \nqstat [-f] [-J] [-p] [-t] [-x] [-E] [-F format | -w] [ job_identifier... ]", 2)
    if "-B" in options:
        server_lines = (
            "    server_state = Active\n    server_host = pbsctl\n    scheduling = True\n    default_queue = workq\n"
        )
        talk.out(f"Server: {SERVER}\n{server_lines}\n")
        return 0
    if "-Q" in options:
        return _queues(server, talk, options, ids)
    jobs, code, wanted = [], 0, ids or [job.id for job in server.jobs.values()]
    if "-x" in options and not flavour.is_torque and not server.settings.history:
        talk.send(err="".join(f"{NO_HISTORY} {given}\n" for given in ids or [""]))
        wanted = []
    for given in wanted:
        try:
            jobs += _asked_for(server, given, options, is_named=bool(ids))
        except RefusedError as error:
            code = talk.refuse(error)
    if "-F" in options:
        talk.out(shown.as_json("Jobs", {job.id: job.attributes() for job in jobs}))
    elif "-f" in options:
        talk.out("".join(shown.full(job, wide="-w" in options or "-1" in options) for job in jobs))
    else:
        talk.out(shown.table(jobs, flavour))
    return code


def _asked_for(server: Server, given: str, options: dict[str, str], *, is_named: bool) -> list[Job]:
    if is_named and not given[0].isdigit():
        if given in server.queues:
            return [job for job in server.jobs.values() if job.queue == given and not job.array and not job.is_over]
        raise RefusedError(f"Unknown queue destination {given}", 170)
    job = found(server, given) if is_named else server.jobs[given]
    if job.is_past and not {"-x", "-H"} & options.keys():
        if not is_named:
            return []
        words = f"{job.id} Job has finished, use -x or -H to obtain historical job information"
        raise RefusedError(words, 35)
    if not is_named and job.array and "-t" not in options:
        return []
    return [job, *(server.children(job.id) if "-t" in options and is_named else [])]


def _queues(server: Server, talk: Conversation, options: dict[str, str], names: list[str]) -> int:
    for name in names:
        if name not in server.queues:
            raise RefusedError(f"Unknown queue {name}", 170)
    queues = {name: shown.queue(name, server.queues[name], server.jobs.values()) for name in names or server.queues}
    if "-F" in options:
        talk.out(shown.as_json("Queue", queues))
    elif "-f" in options:
        for name, attributes in queues.items():
            lines = [f"    {key} = {value}" for key, value in shown.flat(attributes).items()]
            talk.out("\n".join([f"Queue: {name}", *lines, "", ""]))
    else:
        talk.out("Queue              Max   Tot Ena Str\n---------------- ----- ----- --- ---\n")
        talk.out("".join(f"{name:<16} {0:>5} {queue['total_jobs']:>5} yes yes\n" for name, queue in queues.items()))
    return 0


async def qdel(server: Server, talk: Conversation) -> int:
    """End jobs; those that run are told so."""
    options, ids = _options(talk, "W:xpma" if not server.flavour.is_torque else "W:m:pa")
    return await for_each(talk, ids, lambda given: delete(server, given, talk.call.host, options))


def delete(server: Server, given: str, host: str, options: dict[str, str]) -> None:
    """End a job."""
    try:
        job = found(server, given)
    except RefusedError as error:
        if error.code != 153:
            raise
        if server.flavour.is_torque:
            raise RefusedError(f"nonexistent job id: {given}", 153) from None
        raise RefusedError(f"{server.flavour.unknown_job} {given}", 153) from None
    if job.is_over:
        if server.flavour.is_torque:
            raise RefusedError(f"Request invalid for state of job MSG=invalid state for job - COMPLETE {job.id}", 170)
        if "-x" in options:
            del server.jobs[job.id]
            return
        raise RefusedError(f"Job has finished {job.id}", 35)
    if job.state == "E":
        raise RefusedError(f"Request invalid for state of job {job.id}", 168)
    for one in [child for child in server.children(job.id) if not child.is_over] or [job]:
        one.terminated_by = f"root@{host}"
        if run := server.runs.get(one.id):
            one.comment = run.comment()
            if options.get("-W") == "force":
                run.kill()
            else:
                run.terminate()
        elif not one.is_over:
            server.end(one)
    server.schedule()


async def qrerun(server: Server, talk: Conversation) -> int:
    """Have running jobs run again, if the user is an operator."""
    _, ids = _options(talk, "W:f")

    def rerun(given: str) -> Run:
        job = found(server, given)
        if job.is_over:
            raise server.flavour.no_job(job.id)
        if not server.settings.operator:
            raise RefusedError(f"Unauthorized Request  {job.id}", 159)
        run = server.runs.get(job.id)
        if not run or job.state != "R":
            raise RefusedError(f"{server.flavour.not_running[0]} {job.id}", server.flavour.not_running[1])
        if not job.is_rerunnable:
            raise RefusedError(f"job is not rerunnable {job.id}", 190)
        run.over = run.over or "rerun"
        run.terminate()
        return run

    started: list[Run] = []
    code = await for_each(talk, ids, lambda given: started.append(rerun(given)))
    for run in started:
        try:
            async with asyncio.timeout(server.settings.requeue_timeout):
                await run.ended.wait()
        except TimeoutError:
            words = f"Response timed out. Job rerun request still in progress for job {run.job.id}"
            code = talk.refuse(RefusedError(words, 163))
    return code


async def qhold(server: Server, talk: Conversation) -> int:
    """Hold jobs; one that runs only once it is requeued."""

    def hold(given: str) -> None:
        job = _known(server, given)
        job.holds.add("u")
        if job.state == "Q":
            for one in (job, *server.children(job.id)):
                one.state, one.substate = "H", 20

    return await for_each(talk, _options(talk, "h:t:")[1], hold)


async def qrls(server: Server, talk: Conversation) -> int:
    """Release the user's holds."""

    def release(given: str) -> None:
        job = _known(server, given)
        job.holds.discard("u")
        server.unhold(job)

    return await for_each(talk, _options(talk, "h:t:")[1], release)


async def qalter(server: Server, talk: Conversation) -> int:
    """Change the comment or the walltime of jobs."""
    options, ids = _options(talk, "W:l:h:N:r:")

    def alter(given: str) -> None:
        job = _known(server, given)
        name, _, value = options.get("-W", "").partition("=")
        if name == "comment":
            job.comment = value
        name, _, value = options.get("-l", "").partition("=")
        if name:
            job.resources[name] = value
        if "-r" in options:
            job.options["-r"] = options["-r"]

    return await for_each(talk, ids, alter)


def _known(server: Server, given: str) -> Job:
    job = found(server, given)
    if job.is_over:
        raise server.flavour.no_job(job.id)
    return job


async def pbsnodes(server: Server, talk: Conversation) -> int:
    """Show the nodes."""
    if _said_version(talk, server.flavour):
        return 0
    options, names = _options(talk, "avSjLF:" if not server.flavour.is_torque else "axqn")
    known = {node.name: node for node in server.nodes}
    for name in names:
        if name not in known:
            talk.send(err=f"Node: {name},  Error: Unknown node \n")
            return 1
    nodes = {name: shown.node(known[name], server.flavour) for name in names or known}
    if "-F" in options:
        talk.out(shown.as_json("nodes", nodes))
    else:
        talk.out("".join(shown.node_lines(name, attributes) for name, attributes in nodes.items()))
    return 0


COMMANDS: dict[str, Callable[[Any, Any], Awaitable[int]]] = {
    "qsub": qsub,
    "qstat": qstat,
    "qdel": qdel,
    "qrerun": qrerun,
    "qhold": qhold,
    "qrls": qrls,
    "qalter": qalter,
    "pbsnodes": pbsnodes,
    "pbsdsh": pbsdsh,
    "pbs_tmrsh": pbs_tmrsh,
}
