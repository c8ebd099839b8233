"""Slurm: what sbatch, scontrol, sacct, sinfo and salloc are given, and what their answers mean.

Only the plain formats are read: what is needed of them is alike in all versions, where ``--json`` has had three shapes
and reports nothing more. Times are read as UTC, because Slurm is queried in UTC.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import slurm_words
from allranks.clusters.base import Feasibility, Issue
from allranks.clusters.batch.cluster import BatchCluster
from allranks.clusters.batch.limits import NodeInfo, Requested, beyond, crowded, least, missing
from allranks.clusters.batch.scheduler import Additions, JobInfo, Scheduler, UsableGpus, overall
from allranks.clusters.slurm_words import ACCOUNTED, parse_accounted, parse_shown
from allranks.errors import LaunchError
from allranks.job.units import format_duration, format_memory, parse_duration, parse_memory, reading, time_of
from allranks.plan.directives import Directive, given, lines_of, warning_seconds, words_for_shell
from allranks.plan.entry import name_of
from allranks.plan.layout import MOST_RANKS_PER_CPU
from allranks.runs.status import State
from allranks.system.hostlist import expand

if TYPE_CHECKING:
    from allranks.clusters.batch.plan import Draft
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan

_IN_UTC = {"TZ": "UTC0", "SLURM_TIME_FORMAT": "standard"}  # With these its commands write times as we read them.
_ACCOUNTING_SECONDS = 20.0  # Accounting only adds to what the controller reports, and may be slow or away.

# --- Jobs: commands about them, and their logs.

_SHOW = ("scontrol", "show", "job")
_ACCOUNT = ("sacct", "--parsable2", "--noheader", f"--format={','.join(ACCOUNTED)}", "--jobs")


def about(job_id: str, name: str, *words: str) -> tuple[str, ...]:
    """Build a command about a job, whose number comes last; the job may be one of another cluster."""
    number, _, cluster = job_id.partition(";")
    return (name, *([f"--clusters={cluster}"] if cluster else []), *words, number)


def query_job(job_id: str, environ: Mapping[str, str] | None = None) -> JobInfo | None:
    """Query the state of a job: from the controller, and after its end from accounting too, where there is any.

    Returns None if neither knows it: without accounting that is so some minutes after the end.
    """
    in_utc = {**(os.environ if environ is None else environ), **_IN_UTC}
    controller = SLURM.output(about(job_id, *_SHOW), in_utc, gone=SLURM.gone)
    tasks = {task.job_id: task for task in parse_shown(controller)}
    if any(not task.state.is_final for task in tasks.values()):
        return overall(tasks.values())
    with suppress(LaunchError):  # Most sites have accounting, and those that have not are fine without.
        answer = SLURM.output(about(job_id, *_ACCOUNT), in_utc, seconds=_ACCOUNTING_SECONDS)
        # What the controller does not know does not run, whatever accounting has of it. Tasks of an array that have
        # ended long before others are in accounting alone.
        for task in (task for task in parse_accounted(answer) if task.state.is_final):
            shown = tasks.setdefault(task.job_id, task)
            is_oom = (shown.state, task.state) == (State.FAILED, State.OUT_OF_MEMORY)
            if is_oom or task.native.startswith(f"{shown.native} "):  # CANCELLED by 1000.
                shown = replace(shown, state=task.state, native=task.native, why=task.why)
            tasks[task.job_id] = replace(shown, peak_memory=task.peak_memory)
    return overall(tasks.values())


def logs(folder: str, job_id: str, requested: Mapping[str, str]) -> Sequence[str]:
    """Return where Slurm writes what a script says: errors, if the job asks for two logs, then all else."""
    # Each task of an array has an id of its own.
    job = "*" if "--array" in requested else glob.escape(job_id.partition(";")[0])
    known = {"%%": "%", "%j": job, "%A": job}
    names = [glob.escape(requested[option]) for option in ("--error", "--output") if option in requested]
    names.append(f"{folder.replace('%', '%%')}/slurm-%j.out")
    # What sbatch replaces in a name: %j, %4t, and %% for a %.
    return [re.sub(r"%(%|\d*[A-Za-z])", lambda found: known.get(found[0], "*"), name) for name in names]


# --- Limits: what Slurm would do with a job that is not submitted: refuse it, let it wait for ever, or start it.
# ``sbatch --test-only`` says the same of nodes that are down for a day as of those that do not exist, and nothing of a
# job that would wait for ever: one that asks for more time than its partition gives, say. So these are queried too.

_NODES = ("sinfo", "--Node", "--noheader", "--format=%N|%T|%c|%m|%G|%E")
_QOS = ("sacctmgr", "--parsable2", "--noheader", "show", "qos", "format=Name,MaxWall,Flags")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--[a-z-]+|-[A-Za-z])(?:[= ]\s*)?(.*)$", re.MULTILINE)
_SHORT = {"-N": "nodes", "-p": "partition", "-t": "time", "-q": "qos", "-x": "exclude", "-c": "cpus-per-task"}
_ABOVE = {"SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time", "SBATCH_QOS": "qos"}  # Above the script.
#: How the words start for a node that takes no job now.
_NOT_UP = ("down", "drain", "fail", "error", "unknown", "inval", "maint", "reserved", "boot", "reboot", "no_respond")


def feasibility(plan: Plan, environ: Mapping[str, str]) -> Feasibility:
    """Query what Slurm would do with a plan's script that is submitted in an environment."""
    script, in_utc = plan.files[0].text, {**environ, **_IN_UTC}
    requested, submit = read_requested(script, environ), plan.commands[0].command
    command = (submit[0], "--test-only", *submit[1:-1])  # It reads the script.
    done = SLURM.run(command, in_utc, cwd=plan.workdir, sent=script)
    printed = done.out + done.err
    refusal = plan.with_values(SLURM.refusal(command, done.code, printed))
    if SLURM.is_away(done):
        raise refusal
    partitions, lacks_nodes = _against_partitions(requested, in_utc), slurm_words.NO_SUCH_NODES in printed
    against = least(partitions.values(), takes=True)
    if not against and (lacks_nodes or plan.nproc_per_node > MOST_RANKS_PER_CPU):
        found = []
        for name in (name for name, issues in partitions.items() if not issues):
            place, nodes = f"partition {name}", parse_nodes(SLURM.output((*_NODES, f"--partition={name}"), in_utc))
            lacks = missing(requested, place, nodes, "sinfo --list-reasons") if lacks_nodes else []
            found.append(crowded(plan.nproc_per_node, place, nodes) or lacks)
        against = least(found, takes=False)
    start = None if done.code else re.search(r"to start at (\S+) using .* on nodes", printed)
    answer = Feasibility(f"partition {','.join(partitions)}", against, start and time_of(start[1]))
    if not done.code or (against and (lacks_nodes or answer.is_hopeless)):
        return answer
    refused = Issue(refusal.in_a_line, refusal.fix or "change what it asks for", is_refusal=True)
    return answer._replace(objections=[*against, refused])


def _against_partitions(requested: Requested, in_utc: Mapping[str, str]) -> dict[str, list[Issue]]:
    """Query what each partition that a job may run in has against it, by its name."""
    shown = SLURM.output(("scontrol", "show", "partition"), in_utc)
    partitions = against_each(shown, requested)
    if not requested.qos and not all(partitions.values()):
        return partitions  # No QOS could change something.
    try:
        of_qos = parse_qos(SLURM.output(_QOS, in_utc, seconds=_ACCOUNTING_SECONDS), requested.qos)
    except LaunchError as error:
        has_none = "not running a supported accounting_storage plugin" in (error.why or "")
        of_qos = () if has_none else ("PartitionTimeLimit", "PartitionMaxNodes", "PartitionMinNodes"), 0
    return against_each(shown, requested, *of_qos)


def read_requested(script: str, environ: Mapping[str, str]) -> Requested:
    """Read what a script asks for; of two lines for the same the last one counts, and above all the environment."""
    found: dict[str, str] = defaultdict(str)
    found |= {_SHORT.get(name, name[2:]): value.strip().strip("'\"") for name, value in _DIRECTIVE.findall(script)}
    found |= {name: environ[variable] for variable, name in _ABOVE.items() if variable in environ}
    exclude: list[str] = []
    with suppress(ValueError):
        exclude = [*expand(found["exclude"])]
    return Requested(
        partitions=tuple(filter(None, found["partition"].split(","))),
        nodes=reading(found["nodes"].partition("-")[0]) or 1,
        time=reading(found["time"], parse_duration),
        qos=found["qos"],
        cpus=(reading(found["ntasks-per-node"]) or 1) * (reading(found["cpus-per-task"]) or 1),
        memory=reading(found["mem"], parse_memory),
        gpus=count_gpus(f"gpu:{found['gpus-per-node']}") or count_gpus(found["gres"]),
        exclude=tuple(filter(None, exclude)),
    )


def against_each(shown: str, job: Requested, lifts: Collection[str] = (), longest: int = 0) -> dict[str, list[Issue]]:
    """Read in what scontrol shows what each partition that a job may run in has against it, by its name.

    A job that names none runs in the default one. Its QOS ``lifts`` limits, which are not final then, and has its own.
    """
    found: dict[str, list[Issue]] = {}
    other, qos = "choose another scheduler.partition", (f"QOS {job.qos}", "choose another scheduler.qos")
    for block in re.split(r"^(?=PartitionName=)", shown, flags=re.MULTILINE)[1:]:
        part = defaultdict(str, re.findall(r"(\w+)=(\S*)", block))
        name, place = part["PartitionName"], f"partition {part['PartitionName']}"
        if name not in job.partitions if job.partitions else part["Default"] != "YES":
            continue
        is_down = Issue(f"{place} is down: jobs wait until it is up", f"{other}, or wait", is_final=False)
        against = [is_down] if part["State"] == "DOWN" else []
        for flag, of, most, fewest in (
            ("PartitionTimeLimit", "time", reading(part["MaxTime"], parse_duration), 0),
            ("PartitionMaxNodes", "nodes", reading(part["MaxNodes"]), 0),
            ("PartitionMinNodes", "nodes", 0, reading(part["MinNodes"])),
        ):
            amount, is_final = getattr(job, of), flag not in lifts
            against += beyond(of, amount, place, other, most=most, least=fewest, is_final=is_final)
        found[name] = [*against, *beyond("time", job.time, *qos, most=longest)]
    return found


def parse_nodes(text: str) -> tuple[NodeInfo, ...]:
    """Read what sinfo says of nodes, one in a line."""
    found, rows = [], (line.split("|", 5) for line in text.splitlines() if line.count("|") >= 5)
    for name, state, cpus, memory, gres, reason in rows:
        is_away = state.endswith("*") or state.startswith(_NOT_UP)  # With a * it does not answer.
        amounts = reading(cpus.rstrip("+")), reading(memory.rstrip("+")) << 20, count_gpus(gres)
        found.append(NodeInfo(name, state, is_away, *amounts, "" if reason == "none" else reason))
    return tuple(found)


def parse_qos(text: str, named: str) -> tuple[Collection[str], int]:
    """Read what sacctmgr says of each QOS: which limits a QOS of the job, or any if it names none, lifts; its time."""
    lifts, longest = set[str](), 0
    for name, most, flags in (line.split("|") for line in text.splitlines() if line.count("|") == 2):
        if not named or name in named.split(","):
            lifts.update(flags.split(","))
        if name == named:
            longest = reading(most, parse_duration)
    return lifts, longest


# --- The plan: what sbatch is asked for, what an allocation has, and what of the scripts is Slurm's own.

#: Directives of a user's own by which GPUs are requested.
_OWN_GPUS = re.compile(r"--gpus|-G|--gres[ =]\S*gpu|--tres-per\S*gpu")
_OWN_GPUS_PER_NODE = re.compile(r"(?:--gpus-per-node|--gres)[ =](?:gpu:)?(?:[A-Za-z]\w*:)?(\d+)")
_MAIL_TYPES = {"start": "BEGIN", "failure": "FAIL", "requeue": "REQUEUE", "end": "END"}  # Of the events of notify.on.
#: Options for a batch script alone: salloc does not know most of them, and a shell sends no mail.
_FOR_A_SCRIPT = re.compile(
    r"--(array|error|export|export-file|input|mail-\w+|open-mode|output|(no-)?requeue|signal|wait)(?![\w-])|-[aeioW]"
)
#: What a bare salloc starts where LaunchParameters has use_interactive_step; elsewhere it gives a shell where it is
#: typed. From Slurm 20.11 on it runs on the first node, sees the GPUs there, and takes nothing from steps within it: in
#: a plain step, a further srun would wait for ever. Without the preserved variables that would use one node alone.
_STEP = ("srun", "--interactive", "--preserve-env")


def own_gpus(job: Job) -> int | None:
    """Return the GPUs of a node that the user's own directives ask for: 0 for none, None if they do not say."""
    asking = [line for line in lines_of(job, "#SBATCH") if _OWN_GPUS.match(line)]
    reported = [int(match[1]) for line in asking if (match := _OWN_GPUS_PER_NODE.match(line))]
    if reported:
        return reported[0]
    return None if asking else 0


def directives(job: Job, nproc: int, output: str | None) -> Iterator[Directive]:
    """Yield the directives of a job with ``nproc`` ranks on each node, the user's own at the end: the last one counts.

    ``output`` is Slurm's own log unless the job names one; None: as Slurm names it, where the job is submitted.
    """
    requested, resources, is_direct = job.scheduler, job.resources, job.launch.is_direct
    own, (least, most), cpus = lines_of(job, "#SBATCH"), resources.nodes, resources.cpus_per_node
    gpus = resources.gpus_per_node if own_gpus(job) == 0 else None
    named = f"{resources.gpu_type}:{gpus}" if resources.gpu_type else gpus
    is_gres, is_elastic = requested.gpu_request == "gres", least < most and not is_direct
    # With a number of tasks Slurm would never give more than the least nodes.
    has_agents = not is_direct and least == most
    has_tasks = is_direct and not any(re.match(r"--ntasks(?!-)|-n", line) for line in own)
    one_agent = "one task on each node: the agent, which starts the node's ranks"
    log = (requested.output, "scheduler.output") if requested.output else (output, "in the run's directory")
    same_name = ("partition", "account", "qos", "constraint", "reservation", "array", "exclusive", "error")
    again, seconds, wanted = job.retry.by_scheduler, warning_seconds(job), job.retry.warn_before
    when = "retry.warn_before" if seconds >= wanted else f"half of resources.time; retry.warn_before is {wanted:g}"
    warning = f"{seconds} s before the limit this script gets USR1 and hands it on to the ranks, which save and leave"
    yield from given(
        ("--job-name", name_of(job), "name"),
        ("--nodes", most if least == most else f"{least}-{most}", "resources.nodes"),
        ("--no-kill", is_elastic, "resources.nodes", "continue when a node dies: at least the first must live"),
        ("--ntasks-per-node", has_tasks and nproc, "launcher direct: a task is a rank"),
        ("--ntasks-per-node", int(has_agents), "launcher torchrun: a task is an agent", one_agent),
        ("--gres", gpus and is_gres and f"gpu:{named}", "resources.gpus_per_node, scheduler.gpu_request"),
        ("--gpus-per-node", gpus and not is_gres and named, "resources.gpus_per_node"),
        ("--cpus-per-task", cpus and (max(1, cpus // nproc) if is_direct else cpus), "resources.cpus_per_node"),
        ("--mem", resources.memory and format_memory(resources.memory), "resources.memory"),
        ("--time", resources.time and format_duration(resources.time), "resources.time"),
        *((f"--{key}", getattr(requested, key), f"scheduler.{key}") for key in same_name),
        ("--nodelist", ",".join(requested.include or ()), "scheduler.include"),
        ("--exclude", ",".join(requested.exclude or ()), "scheduler.exclude"),
        ("--mail-user", job.notify.mail, "notify.mail"),
        ("--mail-type", job.notify.mail and ",".join(map(_MAIL_TYPES.__getitem__, job.notify.on)), "notify.on"),
        ("--output", *log, "what Slurm and this script say; each rank has a log of its own"),
        ("--open-mode", "append", "a job that is started again continues with the same log"),
        ("--requeue", again, "retry.requeue", "back into the queue when a node fails, and when the job is preempted"),
        ("--no-requeue", not again, "retry.requeue is false", "when a node fails, the job ends"),
        ("--signal", seconds and f"B:USR1@{seconds}", when, warning),
    )
    yield from (Directive(line, None, "scheduler.directives") for line in own)


def gpus_there(environ: Mapping[str, str]) -> UsableGpus:
    """Find the GPUs of each node of an allocation: from the variables of salloc and sbatch, else from Slurm."""
    one_task, per_node = environ.get("SLURM_GPUS_PER_TASK"), environ.get("SLURM_GPUS_PER_NODE", "")
    may_differ = (one_task or environ.get("SLURM_GPUS")) and environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    reported = per_node if may_differ else environ.get("SLURM_GPUS_ON_NODE") or per_node
    counts = {count_gpus(f"gpu:{reported}")} if reported[-1:].isdecimal() else set()  # Of 4, or a100:4.
    problem = "Slurm does not report"
    if not counts:
        command = about(environ["SLURM_JOB_ID"], "scontrol", "--details", "show", "job")
        try:
            shown = SLURM.output(command, environ, seconds=_ACCOUNTING_SECONDS)
            counts = {count_gpus(gres) for gres in re.findall(r"^ +Nodes=\S+ .*\bGRES=(\S*)", shown, re.MULTILINE)}
        except LaunchError as error:
            problem = error.in_a_line
    if not counts:
        note = f"the GPUs of this allocation are not known, and not used: {problem}; --gpus-per-node N uses them"
        return UsableGpus(0, "those of this allocation are not known", note=note)
    least, most = min(counts), max(counts)
    if least == most:
        return UsableGpus(least, f"this allocation has {least or 'none'}{' on each node' if least else ''}")
    differ, fix = f"the nodes of this allocation have {least} to {most}", "gives all nodes the same number"
    note = f"{differ} GPUs, of which {least} on each are used: salloc --gpus-per-node {fix}"
    return UsableGpus(least, differ, must_be_requested=True, note=note)


def count_gpus(gres: str) -> int:
    """Count the GPUs in what Slurm says that a node has: ``gpu:2(IDX:0-1)``, ``nic:1,gpu:a100:4(S:0-1)``."""
    return sum(map(int, re.findall(r"(?:^|,)gpu:(?:[^:,()]+:)?(\d+)", gres)))


def _additions(draft: Draft) -> Additions:
    job, is_alone, gpus = draft.job, draft.request.standalone, draft.gpus
    options = [*([] if is_alone else ["--parsable"]), *(["--export=ALL"] if draft.secrets else [])]
    run_dir = str(draft.request.run_dir).replace("%", "%%").replace("\\", "\\\\")  # As sbatch reads a name.
    log = None if is_alone else f"{run_dir}/slurm-%j.out"
    requested = () if draft.inside else directives(job, draft.layout.nproc_per_node, log)
    node, start = [], []
    if draft.inside:
        step = f'"$SLURM_JOB_ID.$SLURM_STEP_ID" >"${contract.RUN_DIR}/{contract.STEP}"'
        node.append(f'[ "$SLURM_NODEID" -gt 0 ] || echo {step}')
        # A step of an allocation of --gpus-per-task has one task on each node, and would get the GPUs of one.
        if gpus and gpus.count and (gpus.must_be_requested or draft.request.environ.get("SLURM_GPUS_PER_TASK")):
            start.append(f"--gpus-per-node={gpus.count}")
    if not job.launch.is_direct:
        count = f" {contract.NODE_NPROC}=${{SLURM_GPUS_ON_NODE:-${contract.NODE_NPROC}}}"
        node.append(f"export {contract.NODE_RANK}=$SLURM_NODEID{count if draft.has_rank_per_gpu else ''}")
    return Additions(tuple(requested), options, node=node, start=start, notes=_notes(draft))


def _notes(draft: Draft) -> Iterator[str]:
    job, resources, is_direct = draft.job, draft.job.resources, draft.job.launch.is_direct
    if not (draft.inside or resources.cpus_per_node):
        who = "rank" if is_direct else "node"
        yield f"resources.cpus_per_node is not given: where the site gives none with each GPU, a {who} has one CPU"
    overriding = sorted(name for name in draft.request.environ if name.startswith("SBATCH_"))
    if overriding and not draft.inside:
        yield f"set in your environment, and for sbatch above what the script asks for: {', '.join(overriding)}"
    if resources.gpu_type and not resources.gpus_per_node:
        yield "resources.gpu_type says nothing without resources.gpus_per_node"
    if is_direct and resources.nodes[0] < resources.nodes[1]:
        yield "launcher direct asks for a number of ranks on each node, for which Slurm may give the least nodes"
    if draft.request.standalone and not (draft.inside or job.scheduler.output):
        yield "a person who submits the script finds Slurm's own log, slurm-<job>.out, where sbatch is typed"


def _shell(job: Job, nproc: int, words: Sequence[str], environ: Mapping[str, str], terminal: bool) -> tuple[str, ...]:
    """Run ``words``, or the caller's shell. No login shell: its profile may set another PATH than the caller's."""
    options = words_for_shell(job, directives(job, nproc, None), _FOR_A_SCRIPT)
    shell = words or (environ.get("SHELL") or "bash",)
    return ("salloc", *options, *_STEP, *(["--pty"] if terminal else []), *shell)


SLURM = Scheduler(
    name="slurm",
    title="Slurm",
    module="allranks.agent.slurm_job",
    host="$SLURMD_NODENAME",
    passes_environment=True,
    warns_itself=True,
    is_exact=False,
    own_keys=("qos", "gpu_request"),
    without="leave it out: --exclude {}",
    patience="the site's KillWait to leave (30 s, unless changed)",
    independent=("--kill-on-bad-exit=0",),
    script="script.sbatch",
    prefix="#SBATCH",
    allocate="salloc --nodes={}",
    own=lambda job: (None, own_gpus(job)),
    nodes_there=lambda environ: int(environ.get("SLURM_JOB_NUM_NODES") or 1),
    gpus_there=gpus_there,
    additions=_additions,
    shell=_shell,
    place="the cluster's login node; some sites need module load slurm",
    submit="sbatch",
    submitted=re.compile(r"^(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )(\S+))?\s*$", re.MULTILINE),
    list_jobs="squeue --me",
    retry="see scontrol ping, and try again; squeue --me shows whether the job was submitted anyway",
    cancel=lambda job_id: about(job_id, "scancel"),
    gone="Invalid job id specified",  # The controller never knew it, or has forgotten it some minutes after its end.
    show=lambda job_id: about(job_id, *_SHOW),
    query_job=query_job,
    feasibility=feasibility,
    noise=((r"^((slurm_load_jobs )?(error|fatal): )?((Batch job submission failed|allocation failure): )?", ""),),
    unreachable=slurm_words.UNREACHABLE,
    refused=slurm_words.REFUSED,
    logs=logs,
    log_noise=re.compile(  # How srun and Slurm ended the other tasks.
        r"srun: (?:error: \S+: tasks? \S+: |launch/slurm: |(?:Force )?Terminat|Job step aborted)"
        r"|slurmstepd\S*: error: \*\*\* "
    ),
    failure=slurm_words.first_failure,
)
SlurmCluster = partial(BatchCluster, SLURM)
