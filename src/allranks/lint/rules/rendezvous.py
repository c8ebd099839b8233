"""How ranks and agents meet: addresses, ports, ids, node ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import Word
from allranks.lint.reading import View
from allranks.lint.rules.base import (
    TORCHRUN,
    Found,
    fatal,
    hint,
    is_expanded_there,
    is_literal,
    likely,
    several_nodes,
    torch_launches,
)
from allranks.lint.syntax import Given

_STORE = "torch/distributed/elastic/rendezvous of torch 2.13"
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[?::1\]?|0\.0\.0\.0)(?::.*)?")
_PORTS = ("--master-port", "--main-process-port")


def _given(launch: Launch, *names: str) -> Given | None:
    return launch.call.get(*names) if launch.call else None


def _reads(view: View, *names: str) -> bool:
    """Return whether the script sets one of torchrun's own variables, which stand in for its options."""
    return any(view.script.sets(name) for name in names)


def _address(launch: Launch) -> Given | None:
    return _given(launch, "--rdzv-endpoint") or _given(launch, "--master-addr", "--main-process-ip")


@fatal(
    "AR301 local-address-for-many-nodes",
    "{address} is each node itself: {nodes} nodes never meet",
    fix='give the first node\'s name: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    source=_STORE,
)
def _local_address(view: View) -> Iterator[Found]:
    for launch in view.launches:
        given = _address(launch)
        if (
            (launch.nnodes or 0) > 1
            and given
            and given.value
            and _LOCAL.fullmatch(given.value.prefix + ("x" if given.value.prefix.endswith(":") else ""))
        ):
            yield Found(given.word.at, {"address": given.value.shown, "nodes": launch.nnodes})


@fatal(
    "AR302 address-missing",
    "{launcher} of {nodes} nodes gets no address: it takes 127.0.0.1, and does not read MASTER_ADDR",
    fix='--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"',
    source=f"{TORCHRUN} --master-addr, default 127.0.0.1",
)
def _no_address(view: View) -> Iterator[Found]:
    for launch in several_nodes(view):
        if (
            launch.is_static
            and not _address(launch)
            and not _reads(view, "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND")
        ):
            yield Found(launch.command.at, {"nodes": launch.nnodes, "launcher": launch.name})


@fatal(
    "AR303 endpoint-missing",
    "without --rdzv-endpoint each of {nodes} nodes waits for the others on its own localhost",
    fix='--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"',
    source=f"{_STORE}: an empty endpoint is localhost",
)
def _no_endpoint(view: View) -> Iterator[Found]:
    for launch in several_nodes(view):
        backend = _given(launch, "--rdzv-backend")
        is_known = (
            backend is not None and backend.value is not None and backend.value.value in ("c10d", "etcd", "etcd-v2")
        )
        if is_known and not _given(launch, "--rdzv-endpoint", "--standalone") and not _reads(view, "PET_RDZV_ENDPOINT"):
            yield Found(launch.command.at, {"nodes": launch.nnodes})


@fatal(
    "AR304 node-rank-missing",
    "without --node-rank each of {nodes} nodes takes node rank 0",
    fix="--rdzv-backend c10d, which needs none; or --node-rank, expanded on the node",
    source=f"{TORCHRUN} --node-rank, default 0",
)
def _no_node_rank(view: View) -> Iterator[Found]:
    for launch in several_nodes(view):
        if (
            launch.is_static
            and not _given(launch, "--node-rank")
            and not _reads(view, "PET_NODE_RANK", "PET_RDZV_BACKEND")
        ):
            yield Found(launch.command.at, {"nodes": launch.nnodes})


@fatal(
    "AR305 same-node-rank",
    "{starter} starts every node with node rank {rank}",
    fix="--rdzv-backend c10d, which needs none; or --node-rank, expanded on the node",
    source=f"{TORCHRUN} --node-rank",
)
def _same_node_rank(view: View) -> Iterator[Found]:
    for launch in several_nodes(view):
        given = _given(launch, "--node-rank")
        starter = launch.starter
        if not launch.is_static or given is None or not is_literal(given.value) or starter is None:
            continue
        value = given.value.value if given.value else ""
        in_loop = starter.name == "ssh" and bool(starter.context.loops)
        if (
            (starter.name == "srun" and (launch.tasks or 0) > 1)
            or in_loop
            or (starter.name == "pdsh" and "%n" not in (value or ""))
        ):
            yield Found(given.word.at, {"rank": value, "starter": starter.name})


@fatal(
    "AR306 standalone-on-many-nodes",
    "--standalone sets the endpoint to localhost: {nodes} nodes never meet",
    fix="--rdzv-backend c10d --rdzv-id … --rdzv-endpoint …",
    source=f"{TORCHRUN} --standalone",
)
def _standalone(view: View) -> Iterator[Found]:
    for launch in several_nodes(view):
        given = _given(launch, "--standalone")
        if given:
            yield Found(given.word.at, {"nodes": launch.nnodes})


def _is_elastic(launch: Launch) -> bool:
    given = _given(launch, "--nnodes")
    return bool(given and given.value and ":" in given.value.shown)


@fatal(
    "AR307 nnodes-is-not-the-nodes",
    "torchrun waits for {nnodes} nodes, and {tasks} of them are started",
    fix="--nnodes=$SLURM_NNODES",
    source=f"{TORCHRUN} --nnodes",
)
def _wrong_nodes(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        given = _given(launch, "--nnodes")
        starter = launch.starter
        if given is None or launch.nnodes is None or launch.nnodes < 2 or _is_elastic(launch):
            continue
        is_step = starter is not None and starter.name == "srun" and launch.tasks_per_node == 1
        if is_step and launch.tasks is not None and launch.tasks > 1 and launch.tasks != launch.nnodes:
            yield Found(given.word.at, {"nnodes": launch.nnodes, "tasks": launch.tasks})
        elif starter is None and view.script.kind == "slurm" and view.resources.nodes == 1:
            yield Found(given.word.at, {"nnodes": launch.nnodes, "tasks": 1})


@fatal(
    "AR308 each-node-alone",
    "--nnodes is 1: {tasks} nodes train {tasks} models of their own, each on all data",
    fix="--nnodes=$SLURM_NNODES --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint …",
    source=f"{TORCHRUN} --nnodes, default 1",
)
def _each_alone(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        starter = launch.starter
        if (
            launch.nnodes != 1
            or starter is None
            or starter.name != "srun"
            or launch.command.context.loops
            or _reads(view, "PET_NNODES")
        ):
            continue
        if launch.tasks_per_node == 1 and launch.tasks and launch.tasks > 1:
            yield Found(launch.command.at, {"tasks": launch.tasks})


@fatal(
    "AR309 own-name-as-address",
    "{part} is expanded on each node, so that each waits at its own name",
    fix="expand it once, in the batch script, and pass the result",
    source=_STORE,
)
def _own_address(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        given = _address(launch)
        if launch.nnodes == 1 or launch.starter is None or given is None or given.value is None or launch.tasks == 1:
            continue
        for part in given.value.parts:
            is_name = (part.kind == "command" and re.match(r"[$`]\(?hostname\b", part.text)) or part.text == "HOSTNAME"
            if is_name and part.kind != "text" and is_expanded_there(part, launch.command):
                yield Found(part.at, {"part": part.shown})


def _port_words(view: View) -> Iterator[tuple[Word, Launch]]:
    for launch in view.launches:
        given = _given(launch, *_PORTS)
        if given and given.value:
            yield given.value, launch
        endpoint = _given(launch, "--rdzv-endpoint")
        port = endpoint.value.after(":") if endpoint and endpoint.value else None
        if port is not None and "/" not in port.shown:
            yield port, launch


@fatal(
    "AR310 impossible-port",
    "there is no port {port}: the highest is 65535",
    fix="a port from 10000 to 32767",
    source="RFC 9293",
)
def _impossible_port(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        number = word.number
        if number is not None and number > 65535:
            yield Found(word.at, {"port": number})


@fatal(
    "AR311 privileged-port",
    "port {port} is for root only",
    fix="a port from 10000 to 32767",
    source="ip(7), ip_unprivileged_port_start",
)
def _privileged_port(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        number = word.number
        if number is not None and 0 < number < 1024:
            yield Found(word.at, {"port": number})


@likely(
    "AR312 port-grows-with-job-id",
    "{port} grows with the job's number, and passes 65535 one day, or is too small",
    fix="$((10000 + SLURM_JOB_ID % 20000))",
    source="RFC 9293: ports have 16 bits",
)
def _port_from_id(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        for part in word.parts:
            text = part.text
            names_id = re.search(r"(?:SLURM_JOB_?ID|SLURM_ARRAY_JOB_ID|PBS_JOBID|JOB_ID)\b", text)
            if names_id and (
                (part.kind == "arithmetic" and "%" not in text and ":" not in text) or part.kind == "variable"
            ):
                yield Found(word.at, {"port": word.shown})


@fatal(
    "AR313 random-on-each-node",
    "$RANDOM in {option} is expanded on each node: each has a different value, and they never meet",
    fix="expand it once, in the batch script; or use the job's id",
    source=_STORE,
)
def _random_on_each(view: View) -> Iterator[Found]:
    launches = [launch for launch in torch_launches(view) if launch.tasks != 1 and launch.nnodes != 1]
    for launch in launches:
        for name in ("--master-port", "--rdzv-endpoint", "--rdzv-id"):
            given = _given(launch, name)
            for part in given.value.parts if given and given.value else ():
                is_random = part.kind in ("variable", "arithmetic") and "RANDOM" in part.text
                if is_random and is_expanded_there(part, launch.command):
                    yield Found(part.at, {"option": name})


@hint(
    "AR314 random-port",
    "$RANDOM is from 0 to 32767: the port can be one of root's, or in use",
    fix="$((10000 + SLURM_JOB_ID % 20000)), or --standalone on one node",
    source="bash(1), RANDOM",
)
def _bare_random(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        if len(word.parts) == 1 and word.parts[0].kind == "variable" and word.parts[0].text == "RANDOM":
            yield Found(word.at)


@fatal(
    "AR315 same-port-twice",
    "two launchers run side by side with port {port}: the second one fails with EADDRINUSE, or joins the first",
    fix="--standalone, which takes a free port",
    source=f"{TORCHRUN} --standalone",
)
def _same_port(view: View) -> Iterator[Found]:
    seen: dict[str, Launch] = {}
    for launch in torch_launches(view):
        if launch.starter is not None or not launch.command.root.context.is_background or launch.command.context.loops:
            continue
        given = _given(launch, *_PORTS)
        port = given.value.value if given and given.value else None
        nodes = _given(launch, "--node-rank")
        if port is None or port == "0" or nodes is not None:
            continue
        if port in seen:
            yield Found(given.word.at if given else launch.command.at, {"port": port})
        seen[port] = launch


@fatal(
    "AR316 list-as-address",
    "${variable} names all nodes (gpu[01-04]) and is no host",
    fix='$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    source="sbatch(1), SLURM_JOB_NODELIST",
)
def _list_as_address(view: View) -> Iterator[Found]:
    lists = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "PBS_NODEFILE")
    if view.resources.nodes == 1:
        return
    for assignment in view.script.assignments:
        parts = assignment.parts or ()
        if (
            (
                assignment.name in ("MASTER_ADDR", "MASTER_ADDRESS", "HEAD_NODE")
                and len(parts) == 1
                and parts[0].kind == "variable"
            )
            and parts[0].text in lists
            and not parts[0].has_default
        ):
            yield Found(assignment.at, {"variable": parts[0].text})
    for launch in view.launches:
        given = _address(launch)
        first = given.value.parts[0] if given and given.value and given.value.parts else None
        if (
            given
            and first
            and first.kind == "variable"
            and first.text in lists
            and not any(assignment.name.startswith("MASTER_ADDR") for assignment in view.script.assignments)
        ):
            yield Found(given.word.at, {"variable": first.text})


@fatal(
    "AR317 scheme-in-address",
    "{value} has a scheme: torchrun expects HOST:PORT, and refuses it",
    fix="leave tcp:// out",
    source=f"{_STORE}, parse_rendezvous_endpoint",
)
def _scheme(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        given = _address(launch)
        if given and given.value and re.match(r"[a-z]+://", given.value.prefix):
            yield Found(given.word.at, {"value": given.value.shown})


@fatal(
    "AR318 port-in-master-addr",
    "--master-addr {value} has a port, and --master-port is added to it",
    fix="--master-addr HOST --master-port PORT",
    source=TORCHRUN,
)
def _port_in_address(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        given = _given(launch, "--master-addr")
        if (
            given
            and given.value
            and not _given(launch, "--rdzv-endpoint")
            and re.fullmatch(r"[^:\[\]]+:\d+", given.value.shown)
        ):
            yield Found(given.word.at, {"value": given.value.shown})


@likely(
    "AR319 stale-rendezvous-file",
    "{file} is left over if a run is killed; the next one reads it, and hangs or fails",
    fix="a name of its own for each run, with the job's id; or env://",
    source="docs.pytorch.org/docs/stable/distributed.html, shared file-system initialization",
)
def _stale_file(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            if "file:///" in word.shown and is_literal(word):
                yield Found(word.at, {"file": "file:///" + word.shown.partition("file:///")[2]})


@hint(
    "AR320 rdzv-id-missing",
    "without --rdzv-id two jobs with one endpoint join each other",
    fix="--rdzv-id=$SLURM_JOB_ID",
    source=f"{TORCHRUN} --rdzv-id, default none",
)
def _no_id(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        backend = _given(launch, "--rdzv-backend")
        is_c10d = backend and backend.value and backend.value.value == "c10d" and launch.nnodes != 1
        has_id = _given(launch, "--rdzv-id", "--standalone") or _reads(view, "PET_RDZV_ID")
        if is_c10d and _given(launch, "--rdzv-endpoint") and not has_id:
            yield Found(launch.command.at)


@hint(
    "AR321 ignored-by-rendezvous",
    "{option} counts for nothing with --rdzv-backend={backend}",
    fix="leave it out",
    source=f"{TORCHRUN}: only used for static rendezvous",
)
def _ignored(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        backend = _given(launch, "--rdzv-backend")
        if not backend or not backend.value or backend.value.value in (None, "static"):
            continue
        if not _given(launch, "--rdzv-endpoint"):
            continue
        for name in ("--node-rank", "--master-addr", "--master-port"):
            given = _given(launch, name)
            if given:
                yield Found(given.word.at, {"option": name, "backend": backend.value.value})


@hint(
    "AR322 fixed-port",
    "port {port} is in use as soon as a second job starts on the node",
    fix="$((10000 + SLURM_JOB_ID % 20000)), or --standalone on one node",
    source=_STORE,
)
def _fixed_port(view: View) -> Iterator[Found]:
    if view.script.kind == "plain" or view.script.options("exclusive"):
        return
    for word, launch in _port_words(view):
        if is_literal(word) and word.number and word.number >= 1024 and launch.is_torch:
            yield Found(word.at, {"port": word.number})
            return


@hint(
    "AR323 old-rendezvous-backend",
    "the rendezvous backend {backend} needs a server of its own, and torch advises against it",
    fix="--rdzv-backend c10d",
    source="docs.pytorch.org/docs/stable/elastic/rendezvous.html",
)
def _deprecated_backend(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        backend = _given(launch, "--rdzv-backend")
        if backend and backend.value and backend.value.value in ("etcd", "etcd-v2", "zeus"):
            yield Found(backend.word.at, {"backend": backend.value.value})


@hint(
    "AR324 torchrun-overwrites",
    "torchrun sets {name} for each rank, whatever it was",
    fix="leave it out",
    source=f"{TORCHRUN}, environment variables",
)
def _overwritten(view: View) -> Iterator[Found]:
    only = list(view.launches)
    if not only or not all(launch.is_torch and launch.call for launch in only):
        return
    used = {use.name for use in view.script.uses}
    for assignment in view.script.assignments:
        if (
            assignment.name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            and assignment.name not in used
            and assignment.parts is not None
        ) and (assignment.name in view.script.exported or assignment.is_prefix):
            yield Found(assignment.at, {"name": assignment.name})


@hint(
    "AR325 torchrun-does-not-read",
    "torchrun does not read {name}: it sets it for its ranks",
    fix="give its value as --rdzv-endpoint, or --master-addr and --master-port",
    source=TORCHRUN,
)
def _ignored_variables(view: View) -> Iterator[Found]:
    """MASTER_ADDR that is exported, and never given to a torchrun of several nodes, is seen by `_no_address`."""
    used = {use.name for use in view.script.uses}
    launches = list(torch_launches(view))
    if not launches or len(launches) != len(view.launches) or any(launch.nnodes == 1 for launch in launches):
        return
    for assignment in view.script.assignments:
        is_exported = assignment.name in view.script.exported or assignment.is_prefix
        if assignment.name in ("MASTER_ADDR", "MASTER_PORT") and is_exported and assignment.name not in used:
            if all(launch.is_static and launch.nnodes is not None and not _address(launch) for launch in launches):
                return
            yield Found(assignment.at, {"name": assignment.name})
