"""PBS: what qsub, qstat, qdel and pbsnodes of OpenPBS, PBS Pro and Torque are given, and what their answers mean.

Only the plain format is read: OpenPBS' JSON escapes neither all quotes nor all backslashes of the user's variables, and
Torque has none. Times are read as UTC, because PBS is queried in UTC.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters import pbs_words
from allranks.clusters.base import Feasibility, Issue
from allranks.clusters.batch.cluster import BatchCluster
from allranks.clusters.batch.limits import NodeInfo, Requested, beyond, crowded, missing
from allranks.clusters.batch.scheduler import Additions, JobInfo, Scheduler, overall
from allranks.clusters.pbs_directives import LONGEST_NAME, directives, own, own_nodes
from allranks.clusters.pbs_words import Flavour, parse_jobs, seconds
from allranks.errors import JobError, LaunchError, PreflightError
from allranks.job.units import parse_memory, reading
from allranks.plan.directives import plain_name, words_for_shell
from allranks.plan.entry import name_of

if TYPE_CHECKING:
    from allranks.clusters.batch.plan import Draft
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan

#: What PBS itself says, in the run's directory; of an array, where OpenPBS fills in the task.
OWN_LOG, OWN_LOG_OF_TASKS = "pbs.out", "pbs.^array_index^.out"

# --- Jobs: commands about them, and their answers.

#: Options of qstat that show all of a job, the best first. Without -x no job is shown after its end, and there may be
#: no history; without -w lines are wrapped, and a line of a variable's may look like one of PBS'.
_QUERIES: dict[Flavour, tuple[str, ...]] = {"openpbs": ("-x -f -w", "-f -w", "-x -f", "-f"), "torque": ("-f",)}
_FLAVOURS: dict[str, Flavour] = {}


def flavour(environ: Mapping[str, str]) -> Flavour | None:
    """Return which PBS is here, by the version of its qstat, queried once; None if there is no qstat."""
    place = shutil.which("qstat", path=environ.get("PATH"))
    if place is None:
        return None
    if place not in _FLAVOURS:
        done = PBS.run((place, "--version"), environ)
        said = done.out + done.err
        found = re.search(r"(?im)(pbs_version *=)|^version: *\d", said)
        if not found:
            use = "if it is of Slurm or of Grid Engine, use the kind slurm or grid_engine"
            wrapped = "if it starts PBS' own, write scheduler.flavour: openpbs, or torque"
            fix = f"put the directory of PBS' commands first in PATH; {use}; {wrapped}"
            why = f"{place} --version " + (f"said {said.strip()[:200]!r}" if said.strip() else "printed nothing")
            raise LaunchError("this qstat is not PBS'", why=why, fix=fix)
        _FLAVOURS[place] = "openpbs" if found[1] else "torque"
    return _FLAVOURS[place]


def flavour_for(job: Job, environ: Mapping[str, str]) -> Flavour:
    """Return which PBS a job is for: the one that it names, else the one that is here, else OpenPBS."""
    return job.scheduler.flavour or flavour(environ) or "openpbs"


def query_job(job_id: str, environ: Mapping[str, str] | None = None) -> JobInfo | None:
    """Query the state of a job; of an array, that of the task which decides on the array's.

    Returns None if PBS does not know it: after its end that is so at once where PBS keeps no history.
    """
    in_utc = {**(os.environ if environ is None else environ), "TZ": "UTC0"}
    try:
        which = flavour(in_utc) or "openpbs"
    except LaunchError:  # The job was submitted with scheduler.flavour; options that its qstat lacks are left out.
        which = "openpbs"
    for options in _QUERIES[which]:
        command = ("qstat", *options.split(), *(("-t",) if "[]" in job_id else ()), job_id)
        done = PBS.run_patiently(command, in_utc)
        if re.search(pbs_words.NOT_LIKE_THAT, done.err):
            continue
        if done.code and re.search(pbs_words.GONE, done.err):
            return None
        if done.code:
            raise PBS.refusal(command, done.code, done.err)
        if jobs := parse_jobs(done.out):
            # What PBS reports of the array as a whole counts only if it reports of no task.
            return overall([job for job in jobs if "[]" not in job.job_id] or jobs)
    what = f"qstat printed nothing about job {job_id} that allranks can parse"
    raise LaunchError(what, fix="qstat --version shows which it is")


def logs(folder: str, job_id: str, _: Mapping[str, str]) -> Sequence[str]:
    """Return where a job's script and PBS itself write; each task of an array has a log."""
    job = glob.escape(job_id.partition(".")[0]).replace("[[]]", "[[]*]")
    return (f"{folder}/pbs-{job}.out", f"{folder}/{OWN_LOG}")


# --- Limits: what PBS would do with a job that is not submitted: refuse it, let it wait for ever, or take it.
# PBS has nothing to try that with, so its queues and nodes are compared with what the script asks for.

#: The commands that show all queues, all nodes, and the server.
QUEUES, NODES, SERVER = ("qstat", "-Q", "-f"), ("pbsnodes", "-a"), ("qstat", "-B", "-f")
_NOT_UP = ("down", "offline", "unknown", "stale", "unresolvable", "maintenance", "provisioning", "sleep")
_OTHER = "choose another scheduler.partition; qstat -Q lists the queues"


def feasibility(plan: Plan, environ: Mapping[str, str]) -> Feasibility:
    """Query what PBS would do with a plan's script that is submitted in an environment."""
    script = plan.files[0].text
    requested, queues = read_requested(script), parse(PBS.output(QUEUES, environ))
    if requested[0].partitions:
        name = requested[0].partitions[0]
        if "@" not in name and name not in queues:
            return Feasibility(f"queue {name}", [Issue(f"PBS has no queue {name}", _OTHER)])
    else:
        servers = parse(PBS.output(SERVER, environ)).values()
        name = next((server["default_queue"] for server in servers if "default_queue" in server), "")
    queue = queues.get(name.partition("@")[0], {})
    against = [*limits(requested, name, queue)]
    # Other queues than those that execute jobs hand them on, to a server with other nodes.
    if not against and queue.get("queue_type", "").startswith("E"):
        nodes = parse_nodes(PBS.output(NODES, environ))
        against = lacking(script, nodes) + crowded(plan.nproc_per_node, "this PBS", nodes)
    return Feasibility(f"queue {name}" if name else "the default queue", against)


def lacking(script: str, nodes: Sequence[NodeInfo]) -> list[Issue]:
    """Return why nodes are not those that a script needs; one is enough if several of its chunks may share it."""
    may_share = "scatter" not in _in_script(script, "place", "scatter")
    parts = (replace(part, nodes=1) if may_share else part for part in read_requested(script))
    found = (each for part in parts for each in missing(part, "this PBS", nodes, "pbsnodes -l"))
    return [*dict.fromkeys(found)]


def _in_script(script: str, names: str, default: str) -> str:
    """Return what a script asks for with -l; of two lines for the same resource PBS takes the first."""
    found = re.search(rf"^#PBS\s+-l\s*(?:\S*,)?(?:{names})=([^\s,]+)", script, re.MULTILINE)
    return found[1] if found else default


def read_requested(script: str) -> tuple[Requested, ...]:
    """Read what a script asks for, of each kind of nodes."""
    queue = re.findall(r"^#PBS\s+-q\s*(\S+)", script, re.MULTILINE)
    counts: dict[Requested, int] = {}
    for chunk in _in_script(script, "select|nodes", "1").split("+"):
        has = dict(re.findall(r"(\w+)=([^:]+)", chunk))
        kind = Requested(
            partitions=tuple(queue[-1:]),
            time=seconds(_in_script(script, "walltime", "")),
            cpus=reading(has.get("ncpus") or has.get("ppn", "")),
            memory=reading(has.get("mem", ""), parse_memory),
            gpus=reading(has.get("ngpus") or has.get("gpus", "")),
        )
        count = reading(chunk.split(":")[0]) or 1  # One that starts with a host is one.
        counts[kind] = counts.get(kind, 0) + count
    return tuple(replace(kind, nodes=count) for kind, count in counts.items())


def parse(text: str) -> dict[str, dict[str, str]]:
    """Read the answer to :data:`QUEUES`, :data:`NODES` or :data:`SERVER`: the attributes of each, by its name."""
    found: dict[str, dict[str, str]] = {}
    for line in text.replace("\n\t", "").splitlines():
        if head := re.match(r"(?:\w+: )?(\S+)$", line):
            found[head[1]] = {}
        elif found and (attribute := re.match(r"\s+(\S+) = (.*)$", line)):
            [*found.values()][-1][attribute[1]] = attribute[2].strip()
    return found


def parse_nodes(text: str) -> tuple[NodeInfo, ...]:
    """Read the answer to :data:`NODES`; what PBS makes several virtual nodes of is one."""
    hosts: dict[str, NodeInfo] = {}
    for name, node in parse(text).items():
        host, state = node.get("resources_available.host", name), node.get("state", "")
        before = hosts.get(host, NodeInfo(host, state, is_away=True, cpus=0, memory=0, gpus=0))
        hosts[host] = NodeInfo(
            host,
            state,
            before.is_away and any(word in state for word in _NOT_UP),
            before.cpus + reading(node.get("resources_available.ncpus") or node.get("np", "")),
            before.memory + reading(node.get("resources_available.mem", ""), parse_memory),
            before.gpus + reading(node.get("resources_available.ngpus") or node.get("gpus", "")),
            node.get("comment", node.get("note", "")),
        )
    return tuple(hosts.values())


def limits(requested: Sequence[Requested], name: str, queue: Mapping[str, str]) -> Iterator[Issue]:
    """Yield what a queue with such attributes has against a job that asks for these kinds of nodes."""
    if queue.get("enabled") == "False":
        yield Issue(f"queue {name} takes no jobs", _OTHER)
    if queue.get("started") == "False":
        yield Issue(f"queue {name} starts no jobs now", f"wait, or {_OTHER}", is_final=False)
    cpus = sum(part.nodes * part.cpus for part in requested)
    gpus = sum(part.nodes * part.gpus for part in requested)
    for limit, reads, amount, of in (
        ("walltime", seconds, requested[0].time, "time"),
        ("nodect", reading, sum(part.nodes for part in requested), "nodes"),
        ("ncpus", reading, cpus, "cpus in all"),
        ("ngpus", reading, gpus, "gpus in all"),
    ):
        most, least = (reads(queue.get(f"resources_{word}.{limit}", "")) for word in ("max", "min"))
        yield from beyond(of, amount, f"queue {name}", _OTHER, most=most, least=least)


# --- The plan: what an allocation has, and what of the scripts is PBS' own.

#: What -o takes: what stands before a colon is a host, and each version has variables of its own.
_PLAIN_PATH = re.compile(r"[^:\"'\\#,$%^]+")
#: Options for a batch script alone; a shell sends no mail.
_FOR_A_SCRIPT = re.compile(r"-[ejkJmMorRSt](?![A-Za-z])")
#: PBS starts a shell in the home directory, with the PATH of a login: this goes to where the command was typed.
_HERE = 'cd -- "$0" && export PATH="$1" && shift && exec "$@"'


def nodes_there(environ: Mapping[str, str]) -> int:
    """Count the hosts of the allocation that this is inside of; raise a PreflightError if they are not known here."""
    named = environ.get("PBS_NODEFILE")
    try:
        return len(set(Path(named or "").read_text().split()))
    except OSError as error:
        what = f"{named}: {error.strerror}" if named else "not set"
        raise PreflightError(
            "the nodes of this allocation cannot be found out",
            why=f"PBS_NODEFILE is {what}; the first node alone has it",
            fix="type the command on the first node of the allocation, where qsub -I gives its shell",
        ) from error


def _additions(draft: Draft) -> Additions:
    if draft.inside:
        return Additions()
    job, requested, run_dir = draft.job, draft.job.scheduler, str(draft.request.run_dir)
    which = flavour_for(job, draft.request.environ)
    own_log = f"{run_dir}/{OWN_LOG_OF_TASKS if requested.array and which == 'openpbs' else OWN_LOG}"
    names_log = own_log.isprintable() and bool(_PLAIN_PATH.fullmatch(run_dir)) and not draft.request.standalone
    log = shlex.quote(f"{run_dir}/pbs-") + '"${PBS_JOBID%%.*}".out'
    found = directives(job, draft.layout.nproc_per_node, own_log if names_log else None, which)
    return Additions(tuple(found), log=log, notes=_notes(draft, names_log))


def _notes(draft: Draft, names_log: bool) -> Iterator[str]:
    job, resources, requested, nodes = draft.job, draft.job.resources, draft.job.scheduler, own_nodes(draft.job)
    if not (requested.flavour or flavour(draft.request.environ)):
        yield "no qstat here shows which PBS this is: OpenPBS is assumed (scheduler.flavour)"
    if resources.gpu_type:
        yield "resources.gpu_type is not used: sites have names of their own; scheduler.constraint: gpu_model=a100"
    if not (resources.cpus_per_node or nodes):
        yield "resources.cpus_per_node is not given: most sites then give one CPU"
    used = [f"resources.{key}" for key in ("cpus_per_node", "memory") if getattr(resources, key)]
    used += [f"scheduler.{key}" for key in ("constraint", "include", "exclusive") if getattr(requested, key)]
    if nodes and used:
        yield f"scheduler.directives asks for the nodes: {', '.join(used)} not used"
    if not names_log:
        name = plain_name(name_of(job), LONGEST_NAME)
        yield f"what PBS itself says is where qsub is typed, in {name}.o<job>, when the job has ended"


def _shell(job: Job, nproc: int, words: Sequence[str], environ: Mapping[str, str], terminal: bool) -> tuple[str, ...]:
    which = flavour_for(job, environ)
    command = ("qsub", "-I", *words_for_shell(job, directives(job, nproc, None, which), _FOR_A_SCRIPT))
    if which == "openpbs":
        shell = words or (environ.get("SHELL") or "bash",)
        return (*command, "--", "/bin/bash", "-c", _HERE, str(Path.cwd()), environ.get("PATH", ""), *shell)
    if words:
        raise JobError("Torque's qsub -I runs no command", fix="allranks shell without one, and type it there")
    return command


PBS = Scheduler(
    name="pbs",
    title="PBS",
    module="allranks.agent.pbs_job",
    own_keys=("project", "qos", "resources", "flavour", "start_with"),
    without="have PBS leave it out: pbsnodes -o {}",
    patience="the site's kill_delay to leave (10 s, unless changed)",
    script="script.pbs",
    prefix="#PBS",
    allocate="qsub -I -l select={}:... -l place=scatter",
    own=own,
    nodes_there=nodes_there,
    additions=_additions,
    shell=_shell,
    place="the cluster's login node; some sites need module load pbs or torque",
    submit="qsub",
    submitted=re.compile(r"^\s*(\d+(?:\[\d*\])?\.[\w.-]+)\s*$", re.MULTILINE),
    list_jobs="qstat -u $USER",
    retry="see qstat -B, and try again; qstat -u $USER shows whether the job was submitted anyway",
    cancel=lambda job_id: ("qdel", job_id),
    gone=pbs_words.GONE,
    show=lambda job_id: ("qstat", *(("-f",) if flavour(os.environ) == "torque" else ("-x", "-f")), job_id),
    query_job=query_job,
    feasibility=feasibility,
    # The page of usage, and Torque's frame.
    noise=((r"^usage: .*(?:\n[ \t].*)*", ""), (r"submit error \((.*)\)", r"\1")),
    unreachable=pbs_words.UNREACHABLE,
    refused=pbs_words.REFUSED,
    logs=logs,
    log_noise=re.compile(r"pbsdsh: |pbs_tmrsh: "),
)
PbsCluster = partial(BatchCluster, PBS)
