"""How ranks and agents meet: addresses, ports, ids, node ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import MPI, Assignment, Part
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, TORCHRUN, Found, fatal, hint, is_host_name, likely
from allranks.lint.syntax import Given

_STORE = "torch/distributed/elastic/rendezvous of torch 2.13"
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[?::1\]?|0\.0\.0\.0)(?::.*)?")
#: The nodes of a Trainer of Lightning, as Hydra or its own command line takes them.
_TRAINER_NODES = re.compile(r"(?:--)?(?:\w+\.)?trainer\.num_nodes=(\d{1,4})")
_LISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "PBS_NODEFILE")


def _address(launch: Launch) -> Given | None:
    return launch.call.get("--rdzv-endpoint") or launch.call.get("--master-addr", "--main-process-ip")


def _addresses(view: View) -> Iterator[tuple[Launch, Given]]:
    """Yield the launches that are given an address, with that."""
    return ((launch, given) for launch in view.launches if (given := _address(launch)))


def _are_here(view: View, launch: Launch) -> bool:
    """Return whether the nodes of a launcher are all on this machine: those of other node ranks start beside it."""
    given = launch.call.get("--node-rank")
    if given is None or launch.starter:
        return False
    if launch.command.context.is_background and any(
        given.value.names(loop.variable) for loop in launch.command.context.loops
    ):
        return True
    own = (None, given.value.value)
    others = [each for each in view.torchrun if not each.starter and each.call.value("--node-rank") not in own]
    return bool(others) and any(each.command.context.is_background for each in (launch, *others))


@fatal(
    "AR301 local-address-for-many-nodes",
    "{address} is each node itself: {nodes} nodes never meet",
    fix='give the first node\'s name: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    source=_STORE,
)
def _local_address(view: View) -> Iterator[Found]:
    for launch, given in _addresses(view):
        if launch.has_many_nodes and _LOCAL.fullmatch(given.value.prefix) and not _are_here(view, launch):
            yield Found(given.at, {"address": given.value.shown, "nodes": launch.nnodes})


@fatal(
    "AR302 address-missing",
    "{launcher} of {nodes} nodes gets no address: it takes 127.0.0.1, and does not read MASTER_ADDR",
    fix='--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"',
    source=f"{TORCHRUN} --master-addr, default 127.0.0.1",
)
def _no_address(view: View) -> Iterator[Found]:
    if view.script.sets("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"):
        return
    for launch in view.torchrun:
        needs_one = launch.has_many_nodes and launch.is_static and not _address(launch)
        if needs_one and not _are_here(view, launch):
            yield Found(launch.command.at, {"nodes": launch.nnodes, "launcher": launch.name})


@fatal(
    "AR303 endpoint-missing",
    "without --rdzv-endpoint each of {nodes} nodes waits for the others on its own localhost",
    fix='--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"',
    source=f"{_STORE}: an empty endpoint is localhost",
)
def _no_endpoint(view: View) -> Iterator[Found]:
    if view.script.sets("PET_RDZV_ENDPOINT"):
        return
    for launch, backend in view.torchrun_given("--rdzv-backend"):
        needs_one = launch.has_many_nodes and backend.value.value in ("c10d", "etcd", "etcd-v2")
        if needs_one and not launch.is_open and not launch.call.get("--rdzv-endpoint", "--standalone"):
            yield Found(launch.command.at, {"nodes": launch.nnodes})


@fatal(
    "AR304 node-rank-missing",
    "without --node-rank each of {nodes} nodes takes node rank 0",
    fix="--rdzv-backend c10d, which needs none; or --node-rank, expanded on the node",
    source=f"{TORCHRUN} --node-rank, default 0",
)
def _no_node_rank(view: View) -> Iterator[Found]:
    if view.script.sets("PET_NODE_RANK", "PET_RDZV_BACKEND"):
        return
    for launch in view.torchrun:
        if launch.has_many_nodes and launch.is_static and not launch.call.get("--node-rank"):
            yield Found(launch.command.at, {"nodes": launch.nnodes})


@fatal(
    "AR305 same-node-rank",
    "{starter} starts every node with node rank {rank}",
    fix="--rdzv-backend c10d, which needs none; or --node-rank, expanded on the node",
    source=f"{TORCHRUN} --node-rank",
)
def _same_node_rank(view: View) -> Iterator[Found]:
    for launch in view.launches:
        starter, given = launch.starter, launch.call.get("--node-rank", "--machine-rank")
        if given is None or not given.value.is_literal or not _counts_node_ranks(launch):
            continue
        if starter is None:
            if launch.has_many_nodes and _has_unused_rank(view):
                yield Found(given.at, {"rank": given.value.value, "starter": "this script"})
            continue
        rank, is_many = given.value.value or "", (launch.tasks or 0) > 1
        is_repeated = starter.name in ("srun", *MPI) and is_many and (launch.nnodes is None or launch.has_many_nodes)
        in_loop = starter.name == "ssh" and starter.context.loops and not starter.context.is_conditional
        on_all = starter.name == "clush" or (starter.name == "pdsh" and "%n" not in rank)
        if is_repeated or (launch.has_many_nodes and (in_loop or on_all)):
            yield Found(given.at, {"rank": rank, "starter": starter.name})


@fatal(
    "AR328 all-nodes-on-this-machine",
    "the loop starts the ranks of all nodes on this machine: nothing takes them to the others",
    fix="ssh or srun takes each to its node; or one line for each node, typed there",
    source=f"{TORCHRUN} --node-rank",
)
def _all_here(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        given, address = launch.call.get("--node-rank"), launch.call.get("--master-addr")
        around = launch.command.context
        counted = {loop.variable for loop in around.loops if loop.kind == "for"}
        is_here = launch.starter is None and not around.level and not around.function and around.is_background
        if not (is_here and given and address and counted) or launch.nproc == 1:
            continue
        is_local = bool(_LOCAL.fullmatch(address.value.prefix)) or any(
            assignment.name == "CUDA_VISIBLE_DEVICES" for assignment in launch.command.sets
        )
        if given.value.names(*counted) and not is_local:
            yield Found(launch.command.at)


def _has_unused_rank(view: View) -> bool:
    """Return whether the script takes the rank of its node from its environment, and then does not use it."""
    own = view.script.assigned("NODE_RANK", "MACHINE_RANK", "node_rank", "machine_rank")
    return any(each.parts and each.value is None and each.name not in view.script.used for each in own)


def _counts_node_ranks(launch: Launch) -> bool:
    """Return whether a launcher takes the rank of its node as it is given."""
    return launch.is_static or (launch.name == "accelerate" and launch.call.value("--rdzv-backend") in (None, "static"))


@fatal(
    "AR306 standalone-on-many-nodes",
    "--standalone sets the endpoint to localhost: {nodes} nodes never meet",
    fix="--rdzv-backend c10d --rdzv-id … --rdzv-endpoint …",
    source=f"{TORCHRUN} --standalone",
)
def _standalone(view: View) -> Iterator[Found]:
    for launch, given in view.torchrun_given("--standalone"):
        if launch.has_many_nodes:
            yield Found(given.at, {"nodes": launch.nnodes})


@fatal(
    "AR307 nnodes-is-not-the-nodes",
    "{program} waits for {nnodes} nodes, and {tasks} of them are started",
    fix="{option}=$SLURM_NNODES",
    source=f"{TORCHRUN} --nnodes; lightning.ai, Trainer num_nodes",
)
def _wrong_nodes(view: View) -> Iterator[Found]:
    for nnodes, at, tasks in _torchrun_nodes(view):
        yield Found(at, {"program": "torchrun", "nnodes": nnodes, "tasks": tasks, "option": "--nnodes"})
    for launch in view.started_by("srun"):
        if not (launch.is_python and launch.tasks and launch.tasks_per_node):
            continue
        nodes = launch.tasks // launch.tasks_per_node
        for word in launch.command.args:
            match = _TRAINER_NODES.fullmatch(word.value or "")
            if match and int(match[1]) != nodes:
                fields = {"program": "Lightning", "nnodes": match[1], "tasks": nodes, "option": "trainer.num_nodes"}
                yield Found(word.at, fields)


def _torchrun_nodes(view: View) -> Iterator[tuple[int, int, int]]:
    """Yield the nodes that torchrun is told, where, and the nodes that it starts on, which are others."""
    for launch, given in view.torchrun_given("--nnodes"):
        if launch.nnodes is None or launch.nnodes < 2 or ":" in given.value.shown:
            continue
        if launch.starter_name == "srun":
            tasks = launch.tasks if launch.tasks_per_node == 1 else None
            if tasks is not None and tasks > 1 and tasks != launch.nnodes:
                yield launch.nnodes, given.at, tasks
        elif launch.starter is None and view.script.kind == "slurm" and view.resources.nodes == 1:
            rank = launch.call.get("--node-rank")
            if rank and rank.value.is_literal:
                continue  # Each node is a job of its own.
            yield launch.nnodes, given.at, 1


@fatal(
    "AR327 nodes-one-after-the-other",
    "node {rank} starts when node {first} has ended, which waits for it",
    fix="a script that takes the node rank as its argument, started on each machine; or allranks run",
    source=f"{BASH}, Lists",
)
def _one_by_one(view: View) -> Iterator[Found]:
    first: Launch | None = None
    for launch in view.launches:
        rank, context = _node_rank(launch), launch.command.context
        if rank is None or launch.starter or context.loops or context.function or context.is_conditional:
            continue
        if first and _node_rank(first) != rank:
            yield Found(launch.command.at, {"rank": rank, "first": _node_rank(first)})
            return
        first = first or (None if context.is_background else launch)


def _node_rank(launch: Launch) -> int | None:
    """Return the number of the node that a launcher of several nodes is given; None if it is not known."""
    given = launch.call.get("--node-rank", "--machine-rank")
    is_one = launch.nnodes == 1 and launch.name != "accelerate"
    return None if given is None or is_one else given.value.number


@fatal(
    "AR308 each-node-alone",
    "{launcher} is told of 1 node: {tasks} nodes train {tasks} models of their own, each on all data",
    fix="--nnodes=$SLURM_NNODES --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint …; of accelerate "
    "--num_machines, --machine_rank and --main_process_ip",
    source=f"{TORCHRUN} --nnodes, default 1; accelerate launch --num_machines, default 1",
)
def _each_alone(view: View) -> Iterator[Found]:
    if view.script.sets("PET_NNODES"):
        return
    for launch in view.started_by("srun"):
        is_agent = launch.is_torch or launch.name == "accelerate"
        is_alone = is_agent and launch.nnodes == 1 and not launch.command.context.loops
        if is_alone and launch.tasks_per_node == 1 and launch.tasks and launch.tasks > 1:
            yield Found(launch.command.at, {"tasks": launch.tasks, "launcher": launch.name})


@fatal(
    "AR309 own-name-as-address",
    "{part} is expanded on each node, so that each waits at its own name",
    fix="expand it once, in the batch script, and pass the result",
    source=_STORE,
)
def _own_address(view: View) -> Iterator[Found]:
    for launch, given in _addresses(view):
        is_one = launch.nnodes == 1 or launch.starter is None or launch.tasks == 1
        for part in given.value.parts if launch.is_torch and not is_one else ():
            if is_host_name(part) and launch.command.is_expanded_there(part):
                yield Found(part.at, {"part": part.shown})


@fatal(
    "AR313 random-on-each-node",
    "$RANDOM in {option} is expanded on each node: each has a different value, and they never meet",
    fix="expand it once, in the batch script; or use the job's id",
    source=_STORE,
)
def _random_on_each(view: View) -> Iterator[Found]:
    for name in ("--master-port", "--rdzv-endpoint", "--rdzv-id"):
        for launch, given in view.torchrun_given(name):
            for part in given.value.parts if launch.tasks != 1 and launch.nnodes != 1 else ():
                is_random = part.kind in ("variable", "arithmetic") and "RANDOM" in part.text
                if is_random and launch.command.is_expanded_there(part):
                    yield Found(part.at, {"option": name})


def _is_list(part: Part) -> bool:
    return part.kind == "variable" and part.text in _LISTS


@fatal(
    "AR316 list-as-address",
    "${variable} names all nodes (gpu[01-04]) and is no host",
    fix='$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    source="sbatch(1), SLURM_JOB_NODELIST",
)
def _list_as_address(view: View) -> Iterator[Found]:
    if view.resources.nodes == 1:
        return
    for assignment in view.script.assigned("MASTER_ADDR", "MASTER_ADDRESS", "HEAD_NODE"):
        parts = assignment.parts or ()
        if len(parts) == 1 and _is_list(parts[0]) and not parts[0].has_default:
            yield Found(assignment.at, {"variable": parts[0].text})
    is_set = any(assignment.name.startswith("MASTER_ADDR") for assignment in view.script.assignments)
    for _, given in _addresses(view) if not is_set else ():
        if given.value.first and _is_list(given.value.first):
            yield Found(given.at, {"variable": given.value.first.text})


@fatal(
    "AR317 scheme-in-address",
    "{value} has a scheme: torchrun expects HOST:PORT, and refuses it",
    fix="leave tcp:// out",
    source=f"{_STORE}, parse_rendezvous_endpoint",
)
def _scheme(view: View) -> Iterator[Found]:
    for launch, given in _addresses(view):
        if launch.is_torch and re.match(r"[a-z]+://", given.value.prefix):
            yield Found(given.at, {"value": given.value.shown})


@fatal(
    "AR318 port-in-master-addr",
    "--master-addr {value} has a port, and --master-port is added to it",
    fix="--master-addr HOST --master-port PORT",
    source=TORCHRUN,
)
def _port_in_address(view: View) -> Iterator[Found]:
    for launch, given in view.torchrun_given("--master-addr"):
        if not launch.call.get("--rdzv-endpoint") and re.fullmatch(r"[^:\[\]]+:\d+", given.value.shown):
            yield Found(given.at, {"value": given.value.shown})


@likely(
    "AR319 stale-rendezvous-file",
    "{file} is left over if a run is killed; the next one reads it, and hangs or fails",
    fix="a name of its own for each run, with the job's id; or env://",
    source="docs.pytorch.org/docs/stable/distributed.html, shared file-system initialization",
)
def _stale_file(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            if "file:///" in word.shown and word.is_literal:
                yield Found(word.at, {"file": "file:///" + word.shown.partition("file:///")[2]})


@hint(
    "AR320 rdzv-id-missing",
    "without --rdzv-id two jobs with one endpoint join each other",
    fix="--rdzv-id=$SLURM_JOB_ID",
    source=f"{TORCHRUN} --rdzv-id, default none",
)
def _no_id(view: View) -> Iterator[Found]:
    if view.script.sets("PET_RDZV_ID"):
        return
    for launch, backend in view.torchrun_given("--rdzv-backend"):
        call, is_c10d = launch.call, backend.value.value == "c10d" and launch.nnodes != 1
        if is_c10d and call.get("--rdzv-endpoint") and not call.get("--rdzv-id", "--standalone"):
            yield Found(launch.command.at)


@hint(
    "AR321 ignored-by-rendezvous",
    "{option} counts for nothing with --rdzv-backend={backend}",
    fix="leave it out",
    source=f"{TORCHRUN}: only used for static rendezvous",
)
def _ignored(view: View) -> Iterator[Found]:
    for launch, backend in view.torchrun_given("--rdzv-backend"):
        if backend.value.value in (None, "", "static") or not launch.call.get("--rdzv-endpoint"):
            continue
        for name in ("--node-rank", "--master-addr", "--master-port"):
            if given := launch.call.get(name):
                yield Found(given.at, {"option": name, "backend": backend.value.value})


@hint(
    "AR323 old-rendezvous-backend",
    "the rendezvous backend {backend} needs a server of its own, and torch advises against it",
    fix="--rdzv-backend c10d",
    source="docs.pytorch.org/docs/stable/elastic/rendezvous.html",
)
def _deprecated_backend(view: View) -> Iterator[Found]:
    for _, backend in view.torchrun_given("--rdzv-backend"):
        if backend.value.value in ("etcd", "etcd-v2", "zeus"):
            yield Found(backend.at, {"backend": backend.value.value})


def _for_ranks(view: View, *names: str) -> Iterator[Assignment]:
    """Yield the assignments that reach the ranks and that the script itself does not read."""
    for assignment in view.script.assigned(*names):
        is_exported = assignment.is_prefix or assignment.name in view.script.exported
        if is_exported and assignment.name not in view.script.used:
            yield assignment


@hint(
    "AR324 torchrun-overwrites",
    "torchrun sets {name} for each rank, whatever it was",
    fix="leave it out",
    source=f"{TORCHRUN}, environment variables",
)
def _overwritten(view: View) -> Iterator[Found]:
    if not view.torchrun_alone:
        return
    for assignment in _for_ranks(view, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if assignment.parts is not None:
            yield Found(assignment.at, {"name": assignment.name})


@hint(
    "AR325 torchrun-does-not-read",
    "torchrun does not read {name}: it sets it for its ranks",
    fix="give its value as --rdzv-endpoint, or --master-addr and --master-port",
    source=TORCHRUN,
)
def _ignored_variables(view: View) -> Iterator[Found]:
    """MASTER_ADDR that is exported, and never given to a torchrun of several nodes, is seen by `_no_address`."""
    launches = view.launches
    if not view.torchrun_alone or any(launch.nnodes == 1 for launch in launches):
        return
    if all(launch.is_static and launch.nnodes is not None and not _address(launch) for launch in launches):
        return
    for assignment in _for_ranks(view, "MASTER_ADDR", "MASTER_PORT"):
        yield Found(assignment.at, {"name": assignment.name})
