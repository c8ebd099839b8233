"""Grid Engine: what its commands are given, and what their answers mean; as seen on Son of Grid Engine 8.1.9.

The state of a job is in the list of qstat, what keeps it waiting and when it started in ``qstat -j``, its end in qacct.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import Feasibility, Issue
from allranks.clusters.batch import scheduler
from allranks.clusters.batch.cluster import BatchCluster
from allranks.clusters.batch.scheduler import Additions, JobInfo, JobReason, Scheduler, explained, overall
from allranks.errors import JobError
from allranks.job.units import time_of
from allranks.plan.directives import Directive, given, lines_of, mail_letters, plain_name, words_for_shell
from allranks.plan.entry import name_of
from allranks.runs.status import State
from allranks.system.hostlist import expand

if TYPE_CHECKING:
    from allranks.clusters.batch.plan import Draft
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan

#: A letter in a state, ours, and what it stands for; the first that is found counts.
_STATES = (
    ("E", State.PENDING, "error"),
    ("d", State.RUNNING, "being deleted"),
    *((letter, State.RUNNING, "suspended") for letter in "sST"),
    ("r", State.RUNNING, "running"),
    ("t", State.RUNNING, "being started"),
    ("h", State.PENDING, "held"),
    ("", State.PENDING, "waiting"),
)
_QUEUE = "choose another scheduler.partition; qconf -sql lists the queues"
_NAMED = "(?s)(?=.*hard queue list).*?"  # Of a job that names its queue.
#: What is found in what keeps a job waiting, what that means and what to do. The first that is found counts. The queues
#: that are not the job's own are listed as well, and for every job a queue that is disabled.
_MESSAGES: tuple[tuple[str, ...], ...] = (
    (r"job dependencies", "it waits for another job"),
    (r"hold state", "it is held", "let it go with qrls {job}"),
    (r"execution time not reached", "its time to start has not come"),
    (r"max_aj_instances", "as many tasks of its array run as the site allows at a time"),
    (r"clean up of a previous run", "its nodes are cleaned up after an earlier attempt"),
    (r"instance \S+ dropped because it is full", "the slots that it needs are in use"),
    (
        r"\(-l (\S+)\) cannot run (?:at host|in queue) \S+ because it offers only ..:(\w+=[\d.]+?)(?:\.0+)?\s",
        r"\1 is requested, and a host offers \2",
        "ask for less in scheduler.resources or scheduler.directives, or wait; see qhost -F",
    ),
    (rf"{_NAMED}\(-l (\S+)\) cannot run in queue \S+ because of cl", r"its queue does not give \1", _QUEUE),
    (rf'{_NAMED}has no permission for cluster queue "([^"]+)"', r"you may not use queue \1", _QUEUE),
    (rf"{_NAMED}is disabled", "its queue is disabled", f"wait, or {_QUEUE}"),
    (
        r'cannot run in PE "([^"]+)" because it only offers (\d+)',
        r"parallel environment \1 offers \2 slots",
        r"wait, or make resources.cpus_per_node the slots that it gives on each host: allocation_rule in qconf -sp \1",
    ),
    (r"\(-l (\S+)\) cannot run in queue \S+ because of cluster queue", r"no queue gives \1", _QUEUE),
)
#: What commands print if Grid Engine cannot be reached, and what to do.
_UNREACHABLE = (
    (
        r"SGE_ROOT|neither submit nor admin|cell dir|unable to read qmaster name",
        "run this on the login node; some sites need module load sge",
    ),
    (r"commlib error|unable to (?:contact|send message to) qmaster|got send error", "try again when qstat answers"),
)
#: What qsub prints if it refuses a job.
_REFUSED = (
    (r"parallel environment", "set scheduler.parallel_environment to one that qconf -spl lists"),
    (r"unknown queue", "set scheduler.partition to a queue that qconf -sql lists"),
    (r"project", "change scheduler.project"),
    (r"h_rt", "change resources.time"),
    (r"h_vmem", "change resources.memory"),
    (r"resolve hostname", "change scheduler.include or scheduler.exclude"),
    (r'resource "exclusive"', "leave out scheduler.exclusive: this site has no resource of that name"),
    (r"resource|attribute", "change scheduler.resources or scheduler.directives; qconf -sc lists what there is"),
    (r"task", "change scheduler.array; tasks count from 1"),
    (r"object name", "change name"),
    (r"no suitable queues", "ask for less, or choose another scheduler.partition"),
    (r"invalid option|argument|value|format", "change scheduler.directives"),
)


def why_pending(messages: str) -> JobReason | None:
    """Explain what keeps a job waiting, in Grid Engine's words."""
    return explained(_MESSAGES, f"{messages}\n")


def parse(job_id: str, shown: str, listed: str) -> JobInfo | None:
    """Read what ``qstat -j -xml`` and ``qstat -xml`` say of a job, or of an array's tasks; None if it has ended."""
    if f"<JB_job_number>{job_id}</JB_job_number>" not in shown:
        return None
    rows = re.findall(rf"<JB_job_number>{job_id}</JB.*?<state>(\w+)</state>(.*?)</job_list>", listed, re.DOTALL)
    if not rows:  # The list has only the jobs of the user who queries it.
        rows = [("r" if re.search(r"<JAT_start_time>[1-9]", shown) else "qw", "")]
    tasks = ((state, found[1] if (found := re.search(r"<tasks>(.*)</tasks>", row)) else "") for state, row in rows)
    return overall(_in_queue(job_id, letters, of, shown) for letters, of in tasks)


def _in_queue(job_id: str, letters: str, tasks: str, shown: str) -> JobInfo:
    state, word = next((state, word) for letter, state, word in _STATES if letter in letters)
    info = JobInfo(job_id, state, f"{letters} ({word})")
    if state is State.RUNNING:
        began = rf"<JAT_task_number>{tasks if tasks.isdecimal() else 1}</.*?<JAT_start_time>(\d+)<"
        started = re.search(began, shown, re.DOTALL)
        why = None if word in ("running", "being started") else JobReason(f"it is {word}")
        return replace(info, started=float(started[1]) if started else None, why=why)
    if word == "error":
        found = re.search(r"<QIM_message>.*?\]: (?:error: )?(.*?)</QIM_message>", shown, re.DOTALL)
        error = unescape(found[1]) if found else "see qstat -j"
        return replace(info, why=JobReason(f"it could not be started ({error})", "fix that, then qmod -cj {job}"))
    messages = re.findall(r"<MES_message>(.*?)</MES_message>", shown, re.DOTALL)
    return replace(info, why=why_pending(unescape("\n".join(messages))))


def parse_ended(job_id: str, records: str) -> JobInfo | None:
    """Read what qacct says of a job's end. An attempt has a record of its own, and so may a task on another node."""
    last: dict[str, JobInfo] = {}
    for text in re.split(r"^=+$", records, flags=re.MULTILINE)[1:]:
        pairs = (line.partition(" ") for line in text.splitlines())
        record = {name: value.strip() for name, _, value in pairs}
        last[record["taskid"]] = _ended(job_id, record)
    return overall(last.values())


def _ended(job_id: str, record: Mapping[str, str]) -> JobInfo:
    failed, status = int(record["failed"].split()[0]), int(record["exit_status"].split()[0])
    word = record["failed"].partition(":")[2].strip()
    started, ended = (time_of(record[key]) for key in ("start_time", "end_time"))
    info = JobInfo(job_id, State.FAILED, "finished", word, started=started, ended=ended, nodes=record["hostname"])
    killed = status - 128 if status > 128 else None
    if failed == 0:
        state = State.CANCELLED if killed in (signal.SIGTERM, signal.SIGINT) else State.FAILED
        return replace(info, state=state if status else State.SUCCEEDED, exit_code=status)
    if failed == 37:
        limit = re.search(r"h_rt=(\d+)", record["category"])
        if limit and started and ended and ended - started < int(limit[1]):
            return replace(info, signal=killed, why=scheduler.OUT_OF_MEMORY)
        return replace(info, state=State.TIMEOUT, signal=killed, why=scheduler.OUT_OF_TIME)
    if failed == 19:
        return replace(info, state=State.NODE_FAIL, signal=killed, why=JobReason(f"{record['hostname']} was lost"))
    if failed == 25 or (failed == 100 and killed in (signal.SIGKILL, signal.SIGUSR2)):
        return replace(info, state=State.CANCELLED)
    return replace(info, signal=killed, why=None if killed else JobReason(f"Grid Engine says {word}"))


def query_job(job_id: str) -> JobInfo | None:
    """Query the state of a job; None if there is no record of it, as of one that was deleted before it started."""
    environ, command = {**os.environ, "TZ": "UTC0", "LC_ALL": "C"}, ("qstat", "-j", job_id, "-xml")
    shown = GRID_ENGINE.run_patiently(command, environ)
    if shown.code and not re.search(GRID_ENGINE.gone, shown.out + shown.err):
        raise GRID_ENGINE.refusal(command, shown.code, shown.out + shown.err)
    info = parse(job_id, shown.out, GRID_ENGINE.run_patiently(("qstat", "-xml"), environ).out)
    return info or parse_ended(job_id, GRID_ENGINE.run_patiently(("qacct", "-j", job_id), environ).out)


def feasibility(plan: Plan, environ: Mapping[str, str]) -> Feasibility:
    """Query whether the job of a plan's script could ever start: qsub -w v checks that, and submits nothing."""
    queue = re.search(r"^#\$ -q (\S+)", plan.files[0].text, re.MULTILINE)
    where = f"queue {queue[1]}" if queue else "the queues"
    done = GRID_ENGINE.run(("qsub", "-w", "v"), environ, sent=plan.files[0].text)
    if done.code == 0:
        return Feasibility(where)
    error = GRID_ENGINE.refusal(("qsub",), done.code, done.out + done.err)
    if GRID_ENGINE.is_away(done):
        raise error
    why = why_pending(done.out + done.err)
    known = Issue(f"it could never start: {why.text}", why.fix or _QUEUE) if why else None
    return Feasibility(where, [known or Issue(error.why or error.what, error.fix or _QUEUE, is_refusal=True)])


# --- The plan, a shell, and the scheduler.


def own(job: Job) -> tuple[None, int | None]:
    """Return no number of nodes, and 0 GPUs of each for a job that asks for none in words of its own."""
    requests = re.search("(?i)gpu|cuda", " ".join([*job.scheduler.directives, *job.scheduler.resources]))
    return None, None if requests else 0


def nodes_there(environ: Mapping[str, str]) -> int:
    """Count the hosts of the allocation that this is inside of."""
    file = environ.get("PE_HOSTFILE")
    return len({line.split()[0] for line in Path(file).read_text().splitlines()}) if file else 1


def directives(job: Job, nproc: int) -> Iterator[Directive]:
    """Yield what qsub is asked for, with ``nproc`` ranks on a node; raise a JobError for what it cannot do."""
    own, requested, resources, (_, nodes) = lines_of(job, "#$"), job.scheduler, job.resources, job.resources.nodes
    slots = resources.cpus_per_node or (nproc if job.launch.is_direct else 1)
    yield Directive("-S", "/bin/bash", "the shell of this script, whatever yours is")
    if not any(line.startswith("-pe ") for line in own):
        if requested.parallel_environment:
            pe = f"-pe {requested.parallel_environment} {nodes * slots}"
            yield Directive(pe, None, "scheduler.parallel_environment", f"{slots} slots on each of {nodes} nodes")
        elif nodes * slots > 1:
            size = f"{nodes} nodes" if nodes > 1 else f"{slots} CPUs"
            why = "Grid Engine gives a job without one a slot on one host"
            fix = "choose one that qconf -spl lists, with a fixed allocation_rule (qconf -sp)"
            raise JobError(f"scheduler.parallel_environment is not given, for a job of {size}", why=why, fix=fix)
    named, others = (list(expand(",".join(hosts))) if hosts else [] for hosts in (requested.include, requested.exclude))
    if named and len(named) != nodes:
        why = "Grid Engine takes hosts that may be used, not hosts that must be"
        fix = "name as many as there are nodes, or those not to use in scheduler.exclude"
        raise JobError(f"scheduler.include names {len(named)} hosts, for {nodes} nodes", why=why, fix=fix)
    hosts = [f"({'|'.join(named)})"] if named else []
    hosts += [f"!({'|'.join(others)})"] if others else []
    array, _, at_once = (requested.array or "").partition("%")
    yield from given(
        ("-l h_rt", resources.time, "resources.time"),
        ("-l h_vmem", resources.memory and f"{resources.memory // slots >> 10}K", "resources.memory, of each slot"),
        *((f"-l {line}", True, "scheduler.resources") for line in requested.resources),
        (f"-l {requested.constraint}", bool(requested.constraint), "scheduler.constraint"),
        ("-l exclusive", requested.exclusive and "true", "scheduler.exclusive"),
        ("-l hostname", "&".join(hosts), "scheduler.include, scheduler.exclude"),
        ("-q", requested.partition, "scheduler.partition"),
        ("-A", requested.account, "scheduler.account"),
        ("-P", requested.project, "scheduler.project"),
        (f"-ar {requested.reservation}", bool(requested.reservation), "scheduler.reservation"),
        ("-t", array, "scheduler.array"),
        (f"-tc {at_once}", bool(at_once), "scheduler.array"),
        ("-M", job.notify.mail, "notify.mail"),
        ("-m", job.notify.mail and mail_letters(job), "notify.on"),
        ("-N", plain_name(name_of(job)), "name"),
        ("-j", "y", "one log"),
        ("-o", "/dev/null", "the script writes its log itself"),
        ("-notify", True, "time to save", "USR2 comes before SIGKILL; the queue says how long"),
        ("-r", "y" if job.retry.by_scheduler else "n", "retry.requeue", "back into the queue when a node is lost"),
    )
    yield from (Directive(line, None, "scheduler.directives") for line in own)


def _notes(job: Job) -> Iterator[str]:
    if job.resources.gpus_per_node or job.resources.gpu_type:
        yield "GPUs have a name of each site's own: scheduler.resources: [gpu=1] asks for one with each slot"
    if job.resources.memory:
        yield "resources.memory: h_vmem limits virtual memory, of which CUDA takes more than a node has"


def _additions(draft: Draft) -> Additions:
    if draft.inside:
        return Additions()
    task = ".$SGE_TASK_ID" if draft.job.scheduler.array else ""
    log = f'"${contract.RUN_DIR}/grid-engine-$JOB_ID{task}.out"'
    options = () if draft.request.standalone else ("-terse",)
    found = directives(draft.job, draft.layout.nproc_per_node)
    return Additions(tuple(found), options, log, notes=_notes(draft.request.job))


#: qrsh may start a shell before it gives it the terminal. Such a shell stops itself, and nothing continues it.
_WAIT = "while read -r _ _ _ _ own _ _ front _ </proc/$$/stat; ((front > 0 && front != own)); do sleep .1; done"


def _shell(job: Job, nproc: int, words: Sequence[str], environ: Mapping[str, str], terminal: bool) -> tuple[str, ...]:
    for_a_script = re.compile(r"-(?:[ejmMortS]|tc|notify)(?![A-Za-z])")
    options = words_for_shell(job, directives(job, nproc), for_a_script)
    start = 'export PATH="$0" && exec "$@"'
    if terminal:
        start = f"{_WAIT}; {start}"
    path = environ.get("PATH", os.defpath)
    there = ["/bin/bash", "-c", start, path, *(words or (environ.get("SHELL") or "bash",))]
    return ("qrsh", "-cwd", "-now", "no", "-pty", "y" if terminal else "n", *options, shlex.join(there))


GRID_ENGINE = Scheduler(
    name="grid_engine",
    title="Grid Engine",
    module="allranks.agent.grid_engine_job",
    own_keys=("project", "resources", "start_with", "parallel_environment"),
    without="have Grid Engine leave it out: --exclude {}",
    patience="the queue's notify time to leave (60 s, unless changed)",
    script="script.sge",
    prefix="#$",
    allocate="qrsh of {} nodes",
    own=own,
    nodes_there=nodes_there,
    additions=_additions,
    shell=_shell,
    place="the cluster's login node; some sites need module load sge",
    submit="qsub",
    submitted=re.compile(r"^(?:Your job(?:-array)? )?(\d+)(?:\.\S+)?(?: \(.*\) has been submitted)?\s*$", re.MULTILINE),
    list_jobs="qstat",
    retry="see qstat, and try again; it shows whether the job was submitted anyway",
    cancel=lambda job_id: ("qdel", job_id),
    gone=r"(?i)do(?:es)? not exist",
    show=lambda job_id: ("qstat", "-j", job_id),
    query_job=query_job,
    feasibility=feasibility,
    noise=((r"^Unable to run job: ", ""), (r"^(?:job|Job was) rejected:?(?: because)? ?", ""), (r"^Exiting\.$", "")),
    unreachable=_UNREACHABLE,
    refused=_REFUSED,
    logs=lambda folder, job_id, _requested: (f"{folder}/grid-engine-{job_id}*.out",),
)
GridEngineCluster = partial(BatchCluster, GRID_ENGINE)
