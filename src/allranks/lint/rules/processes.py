"""Who starts how many processes, and on which nodes."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.lint.launches import MPI, Launch
from allranks.lint.parse import REMOTE
from allranks.lint.reading import View
from allranks.lint.rules.base import (
    SBATCH,
    SRUN,
    TORCHRUN,
    Found,
    fatal,
    hint,
    is_expanded_too_early,
    likely,
    torch_launches,
)
from allranks.lint.syntax import read_call

_NODE = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
_FIELD = "allranks' notes of what public scripts get wrong"
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")


@fatal(
    "AR101 node-rank-expanded-in-batch",
    "the batch shell expands ${variable} before srun starts: it is 0 for every node, so all nodes are node 0",
    fix="expand it on the node: srun bash -c '… $SLURM_NODEID …' in single quotes, or use --rdzv-backend c10d",
    source=f"{SRUN}, environment variables; {_FIELD}",
)
def _rank_in_batch(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        for word in command.words:
            for part in word.variables:
                if part.text in _NODE and part.value is None and is_expanded_too_early(part, command, "srun", *MPI):
                    yield Found(part.at, {"variable": part.text})


@fatal(
    "AR119 rank-exported-in-batch",
    "the batch shell sets {name} from ${variable}, which is 0 there: every task gets {name}=0",
    fix="set it on the node: srun bash -c 'export {name}=${variable}; exec python …' in single quotes",
    source=f"{SRUN}, environment variables",
)
def _rank_exported(view: View) -> Iterator[Found]:
    if not any(True for _ in view.script.named("srun")):
        return
    for assignment in view.script.assignments:
        parts = assignment.parts or ()
        names = [part.text for part in parts if part.kind == "variable" and part.text in _NODE]
        is_ours = assignment.name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
        if names and is_ours and assignment.level == 0 and not assignment.is_remote and view.script.kind == "slurm":
            yield Found(assignment.at, {"variable": names[0], "name": assignment.name})


@fatal(
    "AR102 agents-for-each-task",
    "{starter} starts {tasks} times {launcher} on each node, and each of them starts {ranks}",
    fix="start one launcher on each node: --ntasks-per-node=1, and the ranks by the launcher's own option",
    source=f"{SBATCH} --ntasks-per-node; {TORCHRUN}",
)
def _multiplied(view: View) -> Iterator[Found]:
    for launch in view.launches:
        if launch.name not in _AGENTS or launch.starter is None or launch.starter.name not in ("srun", *MPI):
            continue
        per_node, nproc = launch.tasks_per_node, launch.nproc
        if per_node is None or per_node < 2 or (launch.nnodes is not None and launch.nnodes == launch.tasks):
            continue
        if nproc == 1 and launch.is_torch and launch.nnodes == 1:
            continue
        ranks = f"{nproc} ranks" if nproc else "its ranks"
        fields = {"starter": launch.starter.name, "tasks": per_node, "launcher": launch.name, "ranks": ranks}
        yield Found(launch.starter.at, fields)


@fatal(
    "AR103 first-node-only",
    "{launcher} starts on the first node only; the other nodes of {nodes} start nothing, and are waited for or idle",
    fix="start it on each node: srun --ntasks-per-node=1 torchrun …, mpirun -npernode 1, or pbsdsh",
    source=f"{SBATCH}, description: a single copy of the batch script runs on the first node",
)
def _first_node_only(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes
    if view.script.kind == "plain" or nodes is None or nodes < 2 or _goes_elsewhere(view):
        return
    for launch in torch_launches(view):
        if launch.starter is None and launch.command.started_by("sbatch") is None:
            yield Found(launch.command.at, {"nodes": nodes, "launcher": launch.name})


@likely(
    "AR105 python-on-first-node-only",
    "python starts on the first node only, {nodes} nodes are requested",
    fix="start it by srun, mpirun or torchrun on each node, or request one node",
    source=f"{SBATCH}, description",
)
def _python_first_node_only(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes
    if view.script.kind == "plain" or nodes is None or nodes < 2 or _goes_elsewhere(view):
        return
    runs = [launch for launch in view.launches if launch.call is None]
    if runs and len(runs) == len(view.launches) and not any(view.script.named("ray", "dask-mpi", "julia")):
        yield Found(runs[-1].command.at, {"nodes": nodes})


def _goes_elsewhere(view: View) -> bool:
    """Return whether the script starts anything on other nodes, or something that may do so."""
    names = REMOTE | {"deepspeed", "sbatch", "horovodrun", "ray"}
    return any(command.name in names for command in view.script.commands)


@fatal(
    "AR104 one-task-for-many-nodes",
    "srun starts one task, on one of {nodes} nodes; the ranks of the others never come",
    fix="give srun --ntasks=$SLURM_NNODES --ntasks-per-node=1, or leave --ntasks out",
    source=f"{SRUN} --ntasks",
)
def _one_task(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes
    if nodes is None or nodes < 2:
        return
    steps = [launch for launch in view.launches if launch.starter is not None and launch.starter.name == "srun"]
    for launch in steps:
        context = launch.command.context
        if launch.tasks != 1 or not launch.is_torch or context.loops or context.is_background or context.function:
            continue
        if len(steps) == 1:
            yield Found(launch.starter.at if launch.starter else 0, {"nodes": nodes})


def _visible(view: View, launch: Launch) -> tuple[int, str] | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves to a launcher, and its text."""
    text = None
    for assignment in view.script.assignments:
        if (
            assignment.name == "CUDA_VISIBLE_DEVICES"
            and not assignment.is_prefix
            and assignment.order < launch.command.order
        ):
            text = assignment.value
    for assignment in launch.command.sets:
        if assignment.name == "CUDA_VISIBLE_DEVICES":
            text = assignment.value
    devices = [device for device in (text or "").split(",") if device]
    return (len(devices), text or "") if devices and all(device.isdecimal() for device in devices) else None


@fatal(
    "AR107 more-ranks-than-visible-gpus",
    "{ranks} ranks start, and CUDA_VISIBLE_DEVICES={devices} shows them {gpus} GPUs: invalid device ordinal",
    fix="list as many devices as there are ranks, or leave CUDA_VISIBLE_DEVICES out",
    source="docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables",
)
def _fewer_visible(view: View) -> Iterator[Found]:
    for launch in view.launches:
        visible = _visible(view, launch)
        if launch.nproc and visible and visible[0] < launch.nproc:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": visible[0], "devices": visible[1]})


@hint(
    "AR109 idle-visible-gpus",
    "CUDA_VISIBLE_DEVICES={devices} shows {gpus} GPUs, and {ranks} ranks start",
    fix="list as many devices as there are ranks",
    source=f"{TORCHRUN} --nproc-per-node",
)
def _more_visible(view: View) -> Iterator[Found]:
    for launch in view.launches:
        visible = _visible(view, launch)
        if launch.nproc and visible and visible[0] > launch.nproc and launch.is_torch:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": visible[0], "devices": visible[1]})


def _gpus(view: View, launch: Launch) -> int | None:
    """Return the GPUs of each node of a launcher, unless its step asks for its own."""
    if launch.starter is not None and launch.starter.name == "srun":
        call = read_call(launch.starter)
        if call and call.get("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task"):
            return None
    return view.resources.gpus


@fatal(
    "AR106 more-ranks-than-gpus",
    "{ranks} ranks start on each node, which has {gpus} GPUs: invalid device ordinal, or two ranks on one GPU",
    fix="make --nproc-per-node equal to the GPUs that are requested for a node",
    source=f"{SBATCH} --gres, --gpus-per-node; NCCL: Duplicate GPU detected",
)
def _more_ranks_than_gpus(view: View) -> Iterator[Found]:
    for launch in view.launches:
        gpus = _gpus(view, launch)
        if launch.nproc and gpus and launch.nproc > gpus and launch.is_torch:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": gpus})


@likely(
    "AR108 idle-gpus",
    "{gpus} GPUs are requested for each node, and {ranks} of them used",
    fix="make --nproc-per-node equal to the GPUs that are requested for a node",
    source=f"{TORCHRUN} --nproc-per-node, default 1",
)
def _idle_gpus(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        gpus = _gpus(view, launch)
        alone = len(view.launches) == 1 and launch.tasks_per_node == 1 and not launch.command.context.loops
        if alone and launch.nproc and gpus and launch.nproc < gpus:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": gpus})


@hint(
    "AR110 no-gpus-requested",
    "{ranks} ranks start on each node, and the directives request no GPU",
    fix="request them: #SBATCH --gpus-per-node=N, or --gres=gpu:N",
    source=f"{SBATCH} --gres",
)
def _no_gpus(view: View) -> Iterator[Found]:
    names = (
        "gres",
        "gpus",
        "gpus-per-node",
        "gpus-per-task",
        "gpus-per-socket",
        "exclusive",
        "tres-per-task",
        "constraint",
    )
    if view.script.kind != "slurm" or view.script.options(*names):
        return
    for launch in view.launches:
        if launch.nproc and launch.nproc > 1 and launch.is_torch and _gpus(view, launch) is None:
            call = read_call(launch.starter) if launch.starter else None
            if call is None or not call.get(*(f"--{name}" for name in names)):
                yield Found(launch.command.at, {"ranks": launch.nproc})
                return


@likely(
    "AR111 gpus-hidden-by-binding",
    "{option} shows each task one GPU: cuda:LOCAL_RANK is then an invalid device ordinal, and NCCL loses peer-to-peer",
    fix="leave --gpu-bind out, so that each rank sees all GPUs of the node and takes that of its local rank",
    source=f"{SBATCH} --gpu-bind",
)
def _hidden_gpus(view: View) -> Iterator[Found]:
    has_steps = any(launch.starter is not None and launch.starter.name == "srun" for launch in view.launches)
    for directive in view.script.options("gpu-bind"):
        if directive.value.startswith(("single", "per_task", "map_gpu", "closest")) and has_steps:
            yield Found(directive.at, {"option": f"--gpu-bind={directive.value}"})
    for command in view.script.named("srun"):
        call = read_call(command)
        given = call.get("--gpu-bind") if call else None
        if given and given.value and given.value.prefix.startswith(("single", "per_task", "map_gpu", "closest")):
            yield Found(given.word.at, {"option": f"--gpu-bind={given.value.shown}"})


@hint(
    "AR112 gpus-per-task",
    "--gpus-per-task also binds each task to its GPU, which hides the others from it",
    fix="request --gpus-per-node, or set --gpu-bind=none",
    source=f"{SBATCH} --gpus-per-task: implicitly sets --gpu-bind",
    versions="Slurm 21.08 and newer",
)
def _gpus_per_task(view: View) -> Iterator[Found]:
    for directive in view.script.options("gpus-per-task"):
        per_node = view.resources.tasks_per_node
        if per_node is not None and per_node > 1 and not view.script.options("gpu-bind"):
            yield Found(directive.at)


@hint(
    "AR113 cpus-not-inherited",
    "srun does not take --cpus-per-task={cpus} over from sbatch: each task gets one CPU",
    fix="srun --cpus-per-task=$SLURM_CPUS_PER_TASK …",
    source="NEWS and RELEASE_NOTES of Slurm 22.05 and 23.11",
    versions="Slurm 22.05 to 23.02",
)
def _cpus_not_inherited(view: View) -> Iterator[Found]:
    script = view.script
    cpus = script.options("cpus-per-task")
    if not cpus or script.sets("SRUN_CPUS_PER_TASK"):
        return
    for command in script.named("srun"):
        call = read_call(command)
        if call and not call.get("--cpus-per-task") and not command.context.is_substitution:
            yield Found(command.at, {"cpus": cpus[-1].value})
            return


@likely(
    "AR114 ranks-from-wrong-count",
    "--nproc-per-node gets {value}, not the number of GPUs of a node",
    fix="give it the GPUs of a node: --nproc-per-node=$SLURM_GPUS_ON_NODE, or gpu",
    source=f"{TORCHRUN} --nproc-per-node",
)
def _nodes_as_ranks(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes
    for launch in torch_launches(view):
        given = launch.call.get("--nproc-per-node") if launch.call else None
        if (
            given
            and given.value
            and given.value.names("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
            and view.resources.gpus != nodes
        ):
            yield Found(given.word.at, {"value": "the number of nodes", "word": given.value.parts[0].shown})
        elif (
            given
            and given.value
            and given.value.names("SLURM_NTASKS", "SLURM_NPROCS")
            and nodes is not None
            and nodes > 1
        ):
            yield Found(
                given.word.at, {"value": "the number of tasks of all nodes", "word": given.value.parts[0].shown}
            )


@fatal(
    "AR115 deepspeed-on-each-node",
    "{starter} starts {tasks} times deepspeed, which itself reaches all nodes over SSH: each starts a training of its "
    "own",
    fix="start deepspeed once, with a hostfile; or torchrun by srun, or deepspeed --no_ssh --node_rank on each node",
    source="deepspeed/launcher/runner.py of DeepSpeed 0.18",
)
def _deepspeed_everywhere(view: View) -> Iterator[Found]:
    for launch in view.launches:
        if launch.name != "deepspeed" or launch.starter is None or launch.call is None:
            continue
        if (launch.tasks or 0) > 1 and not launch.call.get("--no-ssh", "--node-rank"):
            yield Found(launch.starter.at, {"starter": launch.starter.name, "tasks": launch.tasks})


@fatal(
    "AR116 machine-rank-missing",
    "accelerate is told of {nodes} machines and not which one this is: each takes rank 0",
    fix="give --machine_rank on each node, expanded there: bash -c '… --machine_rank $SLURM_NODEID …'",
    source="accelerate/commands/launch.py of Accelerate 1.15",
)
def _accelerate_rank(view: View) -> Iterator[Found]:
    for launch in view.launches:
        call = launch.call
        if launch.name != "accelerate" or call is None or (launch.nnodes or 0) < 2 or not call.get("--num-machines"):
            continue
        if not call.get("--machine-rank", "--config-file", "--rdzv-backend", "--deepspeed-hostfile"):
            yield Found(launch.command.at, {"nodes": launch.nnodes})


@fatal(
    "AR117 num-processes-is-the-total",
    "--num_processes={ranks} is the number of ranks of all {nodes} machines together, not of each",
    fix="multiply: --num_processes $((NODES * GPUS))",
    source="accelerate/commands/launch.py of Accelerate 1.15: the total number of processes",
)
def _accelerate_total(view: View) -> Iterator[Found]:
    for launch in view.launches:
        call = launch.call
        if launch.name != "accelerate" or call is None:
            continue
        ranks, machines = call.number("--num-processes"), call.number("--num-machines")
        gpus = view.resources.gpus
        if ranks and machines and machines > 1 and (ranks == gpus or ranks < machines):
            yield Found(launch.command.at, {"ranks": ranks, "nodes": machines, "gpus": gpus or "its"})


@fatal(
    "AR118 pbsdsh-for-each-line",
    "pbsdsh starts the launcher once for each of the {lines} lines that a node has in the node file",
    fix="pbsdsh -u starts it once on each node; or request mpiprocs=1 (ppn=1)",
    source="pbsdsh(1) of OpenPBS and Torque",
)
def _per_line(view: View) -> Iterator[Found]:
    for launch in view.launches:
        if launch.starter is not None and launch.starter.name == "pbsdsh" and launch.name in _AGENTS:
            processes = view.resources.processes
            call = read_call(launch.starter)
            if processes and processes > 1 and call and not call.get("-u", "-n", "-h"):
                yield Found(launch.starter.at, {"lines": processes})
