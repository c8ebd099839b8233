"""`qsub`: from a call to a job in the queue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbs_standin import submission
from pbs_standin.job import Job
from pbs_standin.resources import (
    Chunk,
    chunks_of_nodes,
    chunks_of_select,
    clock,
    kilobytes,
    no_such_nodes,
    placed,
    seconds,
    totals,
)
from pbs_standin.submission import Wish
from pbs_standin.words import SERVER, Flavour, RefusedError

if TYPE_CHECKING:
    from pbs_standin.server import Conversation, Server

#: What `-l` knows beside select, nodes and place.
COUNTED = ("ncpus", "ngpus", "mem", "mpiprocs")
OTHERS = {"walltime", "cput", "vmem", "pmem", "pvmem", "file", "nice", "software", "arch", "procs", "naccesspolicy"}
PLACE = re.compile(r"(free|pack|scatter|vscatter|excl|exclhost|shared)(:(excl|exclhost|shared|group=\w+))*")
NO_TERMINAL = "\tstandard input and output must be a terminal for\n\tinteractive job submission"


async def qsub(server: Server, talk: Conversation) -> int:
    """Queue a job, and say its id; an interactive one has this command as its terminal."""
    flavour = server.flavour
    if talk.call.args == ["--version"]:
        talk.out(f"{flavour.version}\n")
        return 0
    wish, rest = submission.parsed(talk.call, flavour)
    is_interactive = "-I" in wish.options
    if rest or not (is_interactive or wish.program):
        submission.with_script(wish, await _text(talk, rest), flavour)
    wish.name = wish.options.get("-N") or (Path(rest[0]).name if rest else "STDIN")
    if is_interactive and not talk.call.terminal:
        talk.send(err=f"qsub:{NO_TERMINAL}\n")
        return 1
    job = _job(server, wish)
    if is_interactive:
        return await _interactive(server, talk, job)
    _queue(server, job)
    talk.out(f"{job.id}\n")
    if wish.attributes.get("block") == "true":
        async with server.changed:
            await server.changed.wait_for(lambda: job.is_over)
        return job.exit_status or 0
    return 0


async def _text(talk: Conversation, rest: list[str]) -> str:
    if not rest or rest == ["-"]:
        return str((await talk.ask("stdin"))["text"])
    answer = await talk.ask("file", rest[0])
    if "error" in answer:
        is_folder = answer["error"] == "Is a directory"
        raise RefusedError("script not a file" if is_folder else f"script file:: {answer['error']}", 1)
    if not answer["text"] and not Path(talk.call.folder, rest[0]).is_file():
        raise RefusedError("script not a file", 1)
    return str(answer["text"])


async def _interactive(server: Server, talk: Conversation, job: Job) -> int:
    _number(server, job)
    talk.out(f"qsub: waiting for job {job.id} to start\n")
    server.jobs[job.id] = job
    job.terminal = "wanted"
    job.state = "W"  # Until its terminal is there.
    if not await _until_free(server, job):
        talk.out(f"qsub: Job {job.id} was deleted\n")
        return 1
    talk.out(f"qsub: job {job.id} ready\n\n")
    job.terminal = str((await talk.ask("terminal"))["terminal"])
    job.state = "Q"
    server.schedule()
    async with server.changed:
        await server.changed.wait_for(lambda: job.is_over)
    talk.out(f"\r\nqsub: job {job.id} completed\r\n")
    return 0


def _job(server: Server, wish: Wish) -> Job:
    flavour, options = server.flavour, wish.options
    queue = options.get("-q", "").partition("@")[0] or "workq"
    if queue not in server.queues:
        raise RefusedError(*flavour.unknown_queue)
    if queue == "closedq":
        raise RefusedError("Unauthorized Request ", 159)
    wanted = wish.resources
    for name in wanted.keys() - OTHERS - {*COUNTED, "select", "place", "nodes"}:
        raise RefusedError(flavour.unknown_resource.format(where="Resource_List.", name=name), 187)
    chunks, place, shown = _of_torque(server, wanted) if flavour.is_torque else _of_openpbs(wanted, flavour)
    if "walltime" in wanted:
        shown["walltime"] = clock(_walltime(wanted["walltime"], server.queues[queue], flavour))
    variables = submission.variables(wish, queue, flavour)
    job = Job("", flavour, wish, queue, wish.name, chunks, place, shown, variables)
    if "-h" in options:
        job.state, job.substate, job.holds = "H", 20, {"u"}
    for part in filter(None, wish.attributes.get("depend", "").split(",")):
        kind, *ids = part.split(":")
        job.depend += [(kind, f"{given.partition('.')[0]}.{SERVER}") for given in ids]
    if job.depend:
        job.state, job.substate, job.holds = "H", 22, job.holds | {"s"}
    return job


def _walltime(text: str, limits: dict[str, str], flavour: Flavour) -> int:
    wanted = seconds(text)
    if wanted is None:
        raise RefusedError("Illegal attribute or resource value Resource_List.walltime", 166)
    if wanted > (seconds(limits.get("walltime", "")) or wanted):
        raise RefusedError(*flavour.over_limit)
    return wanted


def _of_openpbs(wanted: dict[str, str], flavour: Flavour) -> tuple[list[Chunk], str, dict[str, Any]]:
    place = wanted.get("place", "")
    if "nodes" in wanted and ("select" in wanted or place):
        raise RefusedError("Cannot be used with select or place: nodes", 6)
    if place and not PLACE.fullmatch(place):
        raise RefusedError("Illegal attribute or resource value Resource_List.place", 166)
    counted = {name: wanted[name] for name in ("mem", "ncpus", "ngpus", "mpiprocs") if name in wanted}
    if counted and "select" in wanted:
        name = next(iter(counted))
        raise RefusedError(f'"-lresource=" cannot be used with "select" or "place", resource is: {name}', 5)
    select = wanted.get("select", "")
    if "nodes" in wanted:
        select, place = _select_of_nodes(wanted["nodes"]), "scatter"
    if not select:
        place = place or "pack"
        select = ":".join(["1", *(f"{name}={value}" for name, value in {"ncpus": "1", **counted}.items())])
    chunks = chunks_of_select(select, flavour)
    shown: dict[str, Any] = {**totals(chunks), "nodect": len(chunks), "place": place or "free", "select": select}
    if "mem" in shown:
        shown["mem"] = f"{shown['mem']}kb"
    if "mpiprocs" in select:
        shown["mpiprocs"] = sum(chunk.lines for chunk in chunks)
    return chunks, place or "free", shown


def _select_of_nodes(text: str) -> str:
    parts = []
    for part in text.split("+"):
        count, *rest = part.split(":")
        cores = next((word.partition("=")[2] for word in rest if word.startswith("ppn=")), "1")
        parts.append(f"{count}:ncpus={cores}:mpiprocs={cores}")
    return "+".join(parts)


def _of_torque(server: Server, wanted: dict[str, str]) -> tuple[list[Chunk], str, dict[str, Any]]:
    for name in ("select", "place", "ngpus", "mpiprocs"):
        if name in wanted:
            raise RefusedError(server.flavour.unknown_resource.format(name=name), 187)
    nodes = wanted.get("nodes", "1")
    chunks = chunks_of_nodes(nodes, [node.name for node in server.nodes])
    if len(chunks) > len(server.nodes) or any(chunk.counted["ncpus"] > 8 for chunk in chunks):
        raise no_such_nodes()
    memory = {"mem": wanted["mem"]} if "mem" in wanted and kilobytes(wanted["mem"]) else {}
    return chunks, "scatter", {**memory, "nodect": len(chunks), "nodes": nodes}


def _number(server: Server, job: Job) -> None:
    number = server.new_number()
    is_array = bool({"-J", "-t"} & job.options.keys())
    job.id = f"{number}{'[]' if is_array else ''}.{SERVER}"
    job.outputs = _outputs(job, "", "")


def _queue(server: Server, job: Job) -> None:
    _number(server, job)
    server.jobs[job.id] = job
    if job.is_array:
        for index in submission.indices(job.options.get("-J") or job.options["-t"]):
            _queue_child(server, job, index)
    if job.depend:
        server.settle(job)
    server.schedule()


def _queue_child(server: Server, array: Job, index: int) -> None:
    name = f"{array.name}-{index}" if array.flavour.is_torque else array.name
    child = Job(
        array.id.replace("[]", f"[{index}]"),
        array.flavour,
        array.wish,
        array.queue,
        name,
        array.chunks,
        array.place,
        array.resources,
        array.variables,
        state=array.state,
        array=array.id,
        index=index,
    )
    child.outputs = _outputs(child, f"-{index}" if array.flavour.is_torque else f".{index}", str(index))
    server.jobs[child.id] = child


def _outputs(job: Job, ending: str, index: str) -> tuple[str, str]:
    call = job.wish.call
    number = re.sub(r"\[.*", "", job.number)
    ending = ending or (".^array_index^" if job.is_array and not job.flavour.is_torque else "")
    found = []
    for letter in "oe":
        given = job.options.get(f"-{letter}", "").replace("^array_index^", index or "^array_index^")
        host, _, path = given.rpartition(":")
        if not given:
            path = f"{job.name}.{letter}{number}{ending}"
        elif not job.flavour.is_torque:
            host = host or "localhost"
        found.append(
            f"{host or call.host}:{call.folder}/{path}" if not path.startswith("/") else f"{host or call.host}:{path}"
        )
    return found[0], found[1]


async def _until_free(server: Server, job: Job) -> bool:
    """Wait until an interactive job could start: its command becomes its terminal then. False if it was deleted."""
    while True:
        given = placed(job.id, job.chunks, job.place, server.nodes)
        if not isinstance(given, str):
            for node in server.nodes:
                node.release(job.id)
            return True
        job.comment = f"Not Running: {given}"
        async with server.changed:
            await server.changed.wait()
        if job.is_over:
            return False
