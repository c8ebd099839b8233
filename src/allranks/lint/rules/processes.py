"""Who starts how many processes, and on which nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import MPI, REMOTE, Word
from allranks.lint.reading import View
from allranks.lint.rules.base import SBATCH, SRUN, TORCHRUN, Found, fatal, hint, likely
from allranks.lint.syntax import read_call

_NODE = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
_FIELD = "allranks' notes of what public scripts get wrong"
_WORKERS = re.compile(r"--?(?:data_?loader[-_])?(?:num[-_]|n[-_]?)workers?")
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
#: Directories that each node has for itself.
_LOCAL = re.compile(r"(?:\$SLURM_TMPDIR|\$TMPDIR|/tmp|/dev/shm|/lscratch|/localscratch)\b")
#: Names of Python scripts that start ranks themselves.
_STARTS_OTHERS = re.compile(r"launch|submit|deepy\.py$")
_HOSTS = re.compile("host|node", re.IGNORECASE)


@fatal(
    "AR101 node-rank-expanded-in-batch",
    "the batch shell expands ${variable} before srun starts: it is 0 for every node, so all nodes are node 0",
    fix="expand it on the node: srun bash -c '… $SLURM_NODEID …' in single quotes, or use --rdzv-backend c10d",
    source=f"{SRUN}, environment variables; {_FIELD}",
)
def _rank_in_batch(view: View) -> Iterator[Found]:
    if view.resources.nodes == 1:
        return  # The only node is node 0.
    given = [launch for launch in view.launches if launch.call.get("--rdzv-backend")]
    numbered = [launch.command for launch in given if launch.call.value("--rdzv-backend") != "static"]
    for command in view.script.commands:
        for part in command.variables:
            is_used = not any(each.at <= part.at < each.end for each in numbered)  # By c10d nodes are numbered anew.
            is_early = part.value is None and command.is_expanded_early(part, "srun", *MPI)
            if part.text in _NODE and is_early and is_used:
                yield Found(part.at, {"variable": part.text})


@fatal(
    "AR119 rank-exported-in-batch",
    "the batch shell sets {name} from ${variable}, which is 0 there: every task gets {name}=0",
    fix="set it on the node: srun bash -c 'export {name}=${variable}; exec python …' in single quotes",
    source=f"{SRUN}, environment variables",
)
def _rank_exported(view: View) -> Iterator[Found]:
    if view.script.kind != "slurm" or not any(view.script.named("srun")):
        return
    is_one = all(launch.tasks == 1 and launch.nproc == 1 for launch in view.launches)
    ranks = ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"]
    if view.torchrun_alone and not any(launch.is_static or launch.is_open for launch in view.launches):
        ranks = ranks[:2]  # Where the nodes find each other by a backend that also gives their ranks.
    for assignment in view.script.assigned(*ranks, *(() if is_one else ("CUDA_VISIBLE_DEVICES",))):
        names = [part.text for part in assignment.parts or () if part.kind == "variable" and part.text in _NODE]
        if assignment.name not in view.script.exported | view.script.used:
            continue
        if names and assignment.level == 0 and not assignment.is_remote:
            yield Found(assignment.at, {"variable": names[0], "name": assignment.name})


@fatal(
    "AR102 agents-for-each-task",
    "{starter} starts {tasks} times {launcher} on each node, and each of them starts {ranks}",
    fix="start one launcher on each node: --ntasks-per-node=1, and the ranks by the launcher's own option",
    source=f"{SBATCH} --ntasks-per-node; {TORCHRUN}",
)
def _multiplied(view: View) -> Iterator[Found]:
    for launch in view.started_by("srun", *MPI):
        per_node, nproc = launch.tasks_per_node, launch.nproc
        agent = _agent(launch)
        if launch.starter is None or agent is None or per_node is None or per_node < 2:
            continue
        is_for_each_task = launch.nnodes is not None and launch.nnodes == launch.tasks
        gpus = view.resources.gpus
        has_too_few_gpus = nproc is not None and gpus is not None and per_node * nproc > gpus
        if (is_for_each_task and not has_too_few_gpus) or (nproc == 1 and launch.is_torch and launch.nnodes == 1):
            continue
        ranks = f"{nproc} ranks" if nproc else "its ranks"
        fields = {"starter": launch.starter.name, "tasks": per_node, "launcher": agent, "ranks": ranks}
        yield Found(launch.starter.at, fields)


def _agent(launch: Launch) -> str | None:
    """Return the name of what starts the ranks of one node; None if it is a rank itself."""
    of_deepspeed = "deepspeed.launcher.launch"  # What deepspeed itself starts on each node.
    if launch.is_python and launch.command.values[:3].count("-m") and of_deepspeed in launch.command.values[:4]:
        return of_deepspeed
    return launch.name if launch.name in _AGENTS else None


def _stays_on_first_node(view: View, nodes: int | None) -> bool:
    """Return whether a job of so many nodes starts nothing on the others, nor something that may do so."""
    names = REMOTE | {"sbatch", "horovodrun", "ray"}
    if view.script.kind == "plain" or (nodes or 0) < 2:
        return False
    is_known = all(launch.starter is None or launch.starter.name for launch in view.launches)
    commands = (command for command in view.script.commands if not command.context.is_substitution)
    return is_known and all(command.name not in names for command in commands)


def _may_reach_others(view: View, launch: Launch) -> bool:
    """Return whether accelerate or deepspeed may start ranks on other nodes itself: a list of hosts names them."""
    given = launch.call.get(
        "--hostfile", "--config-file", "--deepspeed-hostfile", "--launcher", "--deepspeed-config-file"
    )
    return given is not None or b"hostfile" in view.script.text.data.lower()


@fatal(
    "AR103 first-node-only",
    "{launcher} starts on the first node only; the other nodes of {nodes} start nothing, and are waited for or idle",
    fix="start it on each node: srun --ntasks-per-node=1 torchrun …, mpirun -npernode 1, or pbsdsh",
    source=f"{SBATCH}, description: a single copy of the batch script runs on the first node",
)
def _first_node_only(view: View) -> Iterator[Found]:
    for launch in view.launches:
        nodes, rank = view.resources.nodes, launch.call.get("--node-rank")
        if nodes is None and launch.is_torch and not (rank and rank.value.is_literal):
            nodes = launch.nnodes  # Some PBS request GPUs of all nodes together.
        is_here = launch.starter is None and launch.command.started_by("sbatch") is None and not launch.is_python
        if not launch.is_torch and (launch.is_open or _may_reach_others(view, launch)):
            continue
        if is_here and _stays_on_first_node(view, nodes):
            yield Found(launch.command.at, {"nodes": nodes, "launcher": launch.name})


@likely(
    "AR105 python-on-first-node-only",
    "python starts on the first node only, {nodes} nodes are requested",
    fix="start it by srun, mpirun or torchrun on each node, or request one node",
    source=f"{SBATCH}, description",
)
def _python_first_node_only(view: View) -> Iterator[Found]:
    if not _stays_on_first_node(view, view.resources.nodes) or any(view.script.named("ray", "dask-mpi", "julia")):
        return
    programs = (launch.program.shown.rpartition("/")[2] for launch in view.launches if launch.program)
    if b"hostfile" in view.script.text.data.lower() or any(map(_STARTS_OTHERS.search, programs)):
        return
    if view.launches and all(launch.is_python for launch in view.launches):
        yield Found(view.launches[-1].command.at, {"nodes": view.resources.nodes})


@fatal(
    "AR104 one-task-for-many-nodes",
    "srun starts one task, on one of {nodes} nodes; the ranks of the others never come",
    fix="give srun --ntasks=$SLURM_NNODES --ntasks-per-node=1, or leave --ntasks out",
    source=f"{SRUN} --ntasks",
)
def _one_task(view: View) -> Iterator[Found]:
    steps = view.started_by("srun")
    if not view.has_many_nodes or len(steps) != 1:
        return
    launch, context = steps[0], steps[0].command.context
    is_once = launch.tasks == 1 and not (context.loops or context.is_background or context.function)
    if is_once and launch.is_torch and launch.starter:
        yield Found(launch.starter.at, {"nodes": view.resources.nodes})


@hint(
    "AR113 cpus-not-inherited",
    "srun does not take --cpus-per-task={cpus} over from sbatch: each task gets one CPU",
    fix="srun --cpus-per-task=$SLURM_CPUS_PER_TASK …",
    source="NEWS and RELEASE_NOTES of Slurm 22.05 and 23.11",
    versions="Slurm 22.05 to 23.02",
)
def _cpus_not_inherited(view: View) -> Iterator[Found]:
    cpus = view.script.option("cpus-per-task")
    if cpus is None or view.script.sets("SRUN_CPUS_PER_TASK"):
        return
    for command, call in view.calls("srun"):
        if not call.get("--cpus-per-task") and not command.context.is_substitution:
            yield Found(command.at, {"cpus": cpus})
            return


def _variables_of(view: View, word: Word) -> set[str]:
    """Return the variables that stand in a word, also those whose value is that of another one."""
    return {use.name for use in view.script.uses if word.at <= use.at < word.end}


@likely(
    "AR114 ranks-from-wrong-count",
    "{option} gets {value}, not the number of GPUs of a node",
    fix="give it the GPUs of a node, such as $SLURM_GPUS_ON_NODE; torchrun takes gpu for them all",
    source=f"{TORCHRUN} --nproc-per-node",
)
def _nodes_as_ranks(view: View) -> Iterator[Found]:
    for _, given in view.torchrun_given("--nproc-per-node"):
        if given.value.names("SLURM_NNODES", "SLURM_JOB_NUM_NODES") and view.resources.gpus != view.resources.nodes:
            yield Found(given.at, {"value": "the number of nodes", "option": given.typed})
        elif given.value.names("SLURM_NTASKS", "SLURM_NPROCS") and view.has_many_nodes:
            if given.value.number and given.value.number == view.resources.gpus:
                continue
            yield Found(given.at, {"value": "the number of tasks of all nodes", "option": given.typed})
    for launch in view.launches:
        ranks, nodes = launch.call.get("--nproc-per-node", "--num-gpus"), launch.call.get("--nnodes", "--num-nodes")
        factors = [part.text for part in ranks.value.parts if part.kind == "arithmetic"] if ranks else []
        names = _variables_of(view, nodes.value) if nodes else set()
        is_total = any(names & set(re.findall(r"\w+", text)) and "*" in text for text in factors)
        if ranks and is_total:
            yield Found(ranks.at, {"value": "the number of ranks of all nodes", "option": ranks.typed})


@fatal(
    "AR115 deepspeed-on-each-node",
    "{starter} starts {tasks} times deepspeed, which itself reaches all nodes over SSH: each starts a training of its "
    "own",
    fix="start deepspeed once, with a hostfile; or torchrun by srun, or deepspeed --no_ssh --node_rank on each node",
    source="deepspeed/launcher/runner.py of DeepSpeed 0.18",
)
def _deepspeed_everywhere(view: View) -> Iterator[Found]:
    for launch in view.launches:
        is_many = launch.name == "deepspeed" and (launch.tasks or 0) > 1
        if is_many and launch.starter and not launch.call.get("--no-ssh", "--node-rank"):
            yield Found(launch.starter.at, {"starter": launch.starter.name, "tasks": launch.tasks})


def _node_number(view: View, launch: Launch) -> str:
    """Return the variable with a node's number that what starts one task on each of them sets."""
    if launch.starter_name in MPI:
        return "PMI_RANK" if launch.starter_name == "mpiexec.hydra" else "OMPI_COMM_WORLD_RANK"
    if launch.starter_name in ("pbsdsh", "pbs_tmrsh") or view.script.kind == "pbs":
        return "PBS_NODENUM"
    return "SLURM_NODEID" if view.script.kind == "slurm" else "NODE_RANK"


@fatal(
    "AR116 machine-rank-missing",
    "accelerate is told of {nodes} machines and not which one this is: each takes rank 0",
    fix="give --machine_rank on each node, expanded there: bash -c '… --machine_rank ${variable} …'",
    source="accelerate/commands/launch.py of Accelerate 1.15",
)
def _accelerate_rank(view: View) -> Iterator[Found]:
    for launch in view.launches:
        is_one_of_many = launch.name == "accelerate" and launch.has_many_nodes and launch.call.get("--num-machines")
        knows = launch.call.get("--machine-rank", "--config-file", "--rdzv-backend", "--deepspeed-hostfile")
        if is_one_of_many and not knows and not launch.is_open:
            yield Found(launch.command.at, {"nodes": launch.nnodes, "variable": _node_number(view, launch)})


@fatal(
    "AR117 num-processes-is-the-total",
    "--num_processes={ranks} is the number of ranks of all {nodes} machines together, not of each",
    fix="multiply: --num_processes $((NODES * GPUS))",
    source="accelerate/commands/launch.py of Accelerate 1.15: the total number of processes",
)
def _accelerate_total(view: View) -> Iterator[Found]:
    gpus = view.resources.gpus
    for launch in view.launches:
        ranks, machines = launch.call.number("--num-processes"), launch.call.number("--num-machines")
        if launch.name != "accelerate" or not ranks or not machines or machines < 2:
            continue
        if ranks == gpus or ranks < machines:
            yield Found(launch.command.at, {"ranks": ranks, "nodes": machines, "gpus": gpus or "its"})


@fatal(
    "AR118 pbsdsh-for-each-line",
    "pbsdsh starts the launcher once for each of the {lines} lines that a node has in the node file",
    fix="request mpiprocs=1 (ppn=1); Torque's pbsdsh -u, which OpenPBS lacks, starts it once on each node",
    source="pbsdsh(1) of OpenPBS and Torque",
)
def _per_line(view: View) -> Iterator[Found]:
    lines = view.resources.processes or 0
    for launch in view.started_by("pbsdsh") if lines > 1 else ():
        if launch.starter and launch.name in _AGENTS and not read_call(launch.starter).get("-u", "-n", "-h"):
            yield Found(launch.starter.at, {"lines": lines})


@likely(
    "AR120 host-of-the-loop-unused",
    "${name} is not given to srun: which node a step gets is left to Slurm, and two may get the same one",
    fix='srun --nodelist="${name}" …',
    source=f"{SRUN} --nodelist",
)
def _unused_host(view: View) -> Iterator[Found]:
    for launch in view.started_by("srun"):
        starter, loops = launch.starter, launch.command.context.loops
        loop = loops[-1] if loops else None
        if starter is None or loop is None or loop.kind != "for" or launch.nnodes == 1:
            continue
        is_of_hosts = bool(_HOSTS.search(" ".join([loop.variable, *(word.shown for word in loop.words)])))
        uses = (use for use in view.script.uses if use.name == loop.variable and use.at > loop.at)
        is_used = any(not view.is_printed(use.at) for use in uses)
        call = read_call(starter)
        is_one = call.number("--nodes", "--ntasks") == 1
        # Each node of one training has its number, and the step no node.
        is_numbered = launch.has_many_nodes and not call.get("--nodelist", "--relative") and not launch.is_open
        if is_one and (is_numbered or (is_of_hosts and not is_used)):
            yield Found(starter.at, {"name": loop.variable})


@likely(
    "AR122 made-on-the-first-node-only",
    "{program} fills {folder} of the first node: those of the other nodes stay empty",
    fix="srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 {program} …, or a directory that all nodes share",
    source=f"{SBATCH}, description; docs.alliancecan.ca, Using node-local storage",
)
def _made_here(view: View) -> Iterator[Found]:
    if not view.has_many_nodes:
        return
    used = " ".join(launch.command.text for launch in view.started_by("srun") if launch.tasks != 1)
    activated = " ".join(command.first for command in view.script.named("source", "."))
    for command in view.script.named("virtualenv", "tar", "unzip", "cp", "rsync", "python", "python3"):
        is_environment = command.name == "virtualenv" or "venv" in command.values
        folders = [folder for word in command.args if (folder := _LOCAL.match(word.shown))]
        if command.context.via or command.context.function or not folders or not used:
            continue
        if (is_environment and folders[0][0] in activated) or (command.name[0] != "p" and folders[0][0] in used):
            yield Found(command.at, {"program": command.name, "folder": folders[0][0]})
            return


@likely(
    "AR126 more-workers-than-cpus",
    "{option} starts {workers} data loader workers for each rank, and --cpus-per-task=1 gives them one CPU",
    fix="--cpus-per-task={cpus}, or fewer workers",
    source=f"{SBATCH} --cpus-per-task; torch/utils/data/dataloader.py of torch 2.13: suggested max number of worker",
)
def _starved_workers(view: View) -> Iterator[Found]:
    script, resources = view.script, view.resources
    for launch in view.launches if script.kind == "slurm" and not script.options("exclusive") else ():
        given = read_call(launch.starter).number("--cpus-per-task") if launch.starter_name == "srun" else None
        tasks = 1 if launch.starter_name == "srun" else resources.tasks_per_node or resources.tasks or 1
        if (given or resources.cpus_per_task) != 1 or tasks > 1:  # The batch script has the CPUs of all tasks.
            continue
        for word, following in itertools.pairwise([*launch.command.args, launch.command.words[0]]):
            option, _, joined = word.shown.partition("=")
            workers = joined or following.shown
            if _WORKERS.fullmatch(option) and workers.isdecimal() and int(workers) >= 4:
                yield Found(word.at, {"option": option, "workers": workers, "cpus": int(workers) + 1})
                break
