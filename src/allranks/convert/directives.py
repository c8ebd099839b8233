"""Directives of Slurm, PBS and Grid Engine as values of a job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from allranks.convert.draft import Draft, home
from allranks.job.units import parse_duration, parse_memory
from allranks.lint.directives import gpus_in, number
from allranks.lint.expand import UNKNOWN
from allranks.lint.model import Directive

_LOG = "the log is in the run's directory: allranks logs"
_COUNTS = "allranks starts one task on each node"
_MAIL = "notify.on chooses the events of notify.mail"
_ENVIRONMENT = "write what the ranks need of your shell into environment"
_IGNORED = "after the first command, where the scheduler ignores it: write what is meant into this file"
#: Options whose value is a key of the job file as it is.
_PLAIN = {
    "slurm": {
        "partition": "scheduler.partition",
        "account": "scheduler.account",
        "qos": "scheduler.qos",
        "constraint": "scheduler.constraint",
        "nodelist": "scheduler.include",
        "exclude": "scheduler.exclude",
        "reservation": "scheduler.reservation",
        "array": "scheduler.array",
        "mail-user": "notify.mail",
        "chdir": "workdir",
    },
    "pbs": {
        "-q": "scheduler.partition",
        "-A": "scheduler.account",
        "-P": "scheduler.project",
        "-J": "scheduler.array",
        "-t": "scheduler.array",
        "-M": "notify.mail",
        "-d": "workdir",
    },
    "grid_engine": {
        "-q": "scheduler.partition",
        "-A": "scheduler.account",
        "-P": "scheduler.project",
        "-t": "scheduler.array",
        "-M": "notify.mail",
        "-wd": "workdir",
    },
}
#: Options of qsub, of PBS and of Grid Engine alike, that are left out.
_OF_QSUB = {
    **dict.fromkeys(("-o", "-e", "-j"), _LOG),
    "-m": _MAIL,
    "-V": _ENVIRONMENT,
    "-S": "the batch script of allranks is bash",
}
#: Options that are left out, and why.
_LEFT_OUT = {
    "slurm": {
        **dict.fromkeys(("output", "error", "open-mode"), _LOG),
        **dict.fromkeys(("ntasks", "ntasks-per-node", "gpu-bind"), _COUNTS),
        "mail-type": _MAIL,
        "requeue": "retry.requeue is the default",
        "wait-all-nodes": "all agents are waited for",
        "get-user-env": _ENVIRONMENT,
    },
    "pbs": {**_OF_QSUB, "-k": _LOG},
    "grid_engine": {
        **_OF_QSUB,
        "-cwd": "workdir is the directory of the job",
        "-notify": "allranks asks for the warning itself",
    },
}
#: Directives that say how many nodes, and GPUs of each node, there are, in the order in which they count.
_COUNTED = {
    "resources.nodes": ("nodes", "ntasks", "ntasks-per-node", "-l"),
    "resources.gpus_per_node": ("gpus-per-node", "gres", "gpus", "gpus-per-task", "-l"),
}


def take_directives(draft: Draft) -> None:
    """Take over the directives that the scheduler reads."""
    script = draft.view.script
    if script.kind == "plain":
        return
    read = script.read
    own = [each for each in script.directives if each.family == script.kind]
    if own:
        draft.put("cluster", script.kind, own[0].at, script.text.line(draft.line(own[0].at)).split()[0])
    for directive in own:
        if directive not in read:
            draft.not_taken(directive.at, f"{_words(directive)}: {_IGNORED} (AR401)")
    for start, end in script.statements:
        text = draft.source(start, end)
        for found in re.finditer(r"^#(?:SBATCH|PBS)[ \t]+-.*", text if "<<" not in text else "", re.MULTILINE):
            at = start + len(text[: found.start()].encode())
            draft.not_taken(at, f"{found[0].strip()}: under a condition, {_IGNORED}")
    for directive in read:
        name, value = directive.name, directive.value
        if UNKNOWN in value:  # A here-document, of which another shell expands this.
            line = script.text.line(draft.line(directive.at))
            draft.not_taken(directive.at, f"{line}: its value is not in the script")
        elif "$" in value and not re.search(r"PBS_O_|JOB_ID|TASK_ID", value) and name not in ("output", "error"):
            draft.not_taken(directive.at, f"{_words(directive)}: a directive expands no variables (AR402)")
        elif name in _PLAIN[script.kind]:
            _put(draft, directive, _PLAIN[script.kind][name], home(value))
        elif name in ("no-requeue", "-r"):
            if name == "no-requeue" or value.startswith("n"):
                _put(draft, directive, "retry.requeue", False)
        elif name in ("job-name", "-N"):
            if clean := re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:64]:
                _put(draft, directive, "name", clean)
        elif name in _LEFT_OUT[script.kind]:
            draft.left_out(directive.at, f"{_words(directive)}: {_LEFT_OUT[script.kind][name]}")
        elif not _TAKERS[script.kind](draft, directive):
            draft.add_line("directives", _words(directive), directive.at)
    resources = draft.view.resources
    counts = {"resources.nodes": resources.nodes, "resources.gpus_per_node": resources.gpus}
    for path, count in counts.items():
        source = next((each for name in _COUNTED[path] for each in reversed(read) if _gives(each, name)), None)
        if source is not None and count is not None and path not in draft.values:
            _put(draft, source, path, count)
    tasks = resources.tasks_per_node or 1
    for source in script.options("cpus-per-task")[-1:] if script.kind == "slurm" and resources.cpus_per_task else ():
        times = f" for each of {tasks} tasks" if tasks > 1 else ""
        cpus = (resources.cpus_per_task or 0) * tasks
        draft.put("resources.cpus_per_node", cpus, source.at, _words(source) + times)


def _gives(directive: Directive, name: str) -> bool:
    is_count = name != "-l" or re.search(r"(?:^|,)(select|nodes)=", directive.value)
    return directive.name == name and bool(is_count)


def _words(directive: Directive) -> str:
    """Return a directive as people write it."""
    option, between = (f"--{directive.name}", "=") if directive.family == "slurm" else (directive.name, " ")
    return f"{option}{between}{directive.value}" if directive.value else option


def _put(draft: Draft, directive: Directive, path: str, value: object) -> None:
    draft.put(path, value, directive.at, _words(directive))


def _time(draft: Draft, directive: Directive, value: str) -> bool:
    """Take a time limit, of which 0 is none."""
    if directive.family != "slurm":  # Of PBS and Grid Engine a bare number, or the last part, is seconds.
        if not re.fullmatch(r"\d+(:\d+){0,2}", value):
            return False
        seconds = sum(int(part) * 60**power for power, part in enumerate(reversed(value.split(":"))))
        value = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    with suppress(ValueError):
        parse_duration(value)
        _put(draft, directive, "resources.time", value)
        return True
    return False


def _memory(draft: Draft, directive: Directive, value: str) -> bool:
    with suppress(ValueError):
        if parse_memory(value):
            _put(draft, directive, "resources.memory", value)
            return True
    return False


def _slurm(draft: Draft, directive: Directive) -> bool:
    name, value = directive.name, directive.value
    if name == "time":
        return _time(draft, directive, value)
    if name == "mem":
        return _memory(draft, directive, value)
    if name == "nodes":
        low, _, high = value.partition("-")
        if high and number(value):
            _put(draft, directive, "resources.nodes", f"{low}:{high}")
        return number(value) is not None
    if name == "gres" and not re.fullmatch(r"gpu(:[\w.+-]+)*", value):
        return False
    if name in ("gpus-per-node", "gres", "gpus", "gpus-per-task"):
        if gpus_in(value) is None or draft.view.resources.gpus is None:
            return False
        if typed := re.fullmatch(r"(?:gpu:)?(?!gpu:)([A-Za-z][\w.+-]*):\d+", value):
            _put(draft, directive, "resources.gpu_type", typed[1])
        if name == "gres":
            _put(draft, directive, "scheduler.gpu_request", "gres")
        return True
    if name == "cpus-per-task":
        return number(value) is not None
    if name == "exclusive" and not value:
        _put(draft, directive, "scheduler.exclusive", True)
        return True
    if name == "signal":
        if before := re.search(r"@(\d+)$", value):
            _put(draft, directive, "retry.warn_before", int(before[1]))
        what = "the ranks get SIGUSR1 to save, and the job is requeued if they then exit with 75"
        draft.changed(directive.at, f"{_words(directive)}: {what}")
        return True
    if name == "export":
        note = draft.left_out if value.upper() == "ALL" else draft.not_taken
        note(directive.at, f"{_words(directive)}: the job's environment comes along, with environment.variables")
        return True
    return False


def _pbs(draft: Draft, directive: Directive) -> bool:
    if directive.name != "-l":
        return False
    for item in re.split(r",(?=[A-Za-z_]+=)", directive.value):
        name, _, value = item.partition("=")
        if name == "walltime" and _time(draft, directive, value):
            continue
        if name in ("select", "nodes"):
            _chunks(draft, directive, item, value)
        elif name == "place":
            if "excl" in value:
                draft.put("scheduler.exclusive", True, directive.at, f"-l {item}")
            draft.left_out(directive.at, f"-l {item}: allranks places one chunk on each node")
        elif name == "mem" and draft.view.resources.nodes in (None, 1) and _memory(draft, directive, value):
            continue
        elif name in ("ngpus", "ncpus") and number(value):
            draft.put(f"resources.{name[1:]}_per_node", int(value), directive.at, f"-l {item}")
        else:
            draft.add_line("resources", item, directive.at)
    return True


def _chunks(draft: Draft, directive: Directive, item: str, text: str) -> None:
    chunks = [chunk.partition(":") for chunk in text.split("+")]
    if len({rest for _, _, rest in chunks}) > 1 or not chunks[0][0].isdecimal():
        draft.not_taken(directive.at, f"-l {item}: nodes that differ; all nodes of a job are requested alike")
        return
    further: list[str] = []
    for part in filter(None, chunks[0][2].split(":")):
        name, _, value = part.partition("=")
        if name in ("ncpus", "ppn") and number(value):
            draft.put("resources.cpus_per_node", int(value), directive.at, f"-l {item}")
        elif name == "mem" and _memory(draft, directive, value):
            continue
        elif name in ("ngpus", "gpus", "mpiprocs", "ompthreads"):
            continue  # GPUs are in lint's resources; the others count processes and threads of MPI.
        else:
            further.append(part)
    if further:
        draft.put("scheduler.constraint", ":".join(further), directive.at, f"-l {item}")


def _grid_engine(draft: Draft, directive: Directive) -> bool:
    name, value = directive.name, directive.value
    if name == "-pe":
        environment, _, slots = value.partition(" ")
        _put(draft, directive, "scheduler.parallel_environment", environment)
        if number(slots):
            nodes = max((launch.nnodes or 1 for launch in draft.view.launches), default=1)
            if nodes > 1:
                draft.put("resources.nodes", nodes, directive.at, f"-pe {value}, and --nnodes={nodes}")
            _put(draft, directive, "resources.cpus_per_node", max(1, int(slots) // nodes))
        return True
    if name != "-l":
        return False
    for item in value.split(","):
        key, _, amount = item.partition("=")
        if key in ("h_rt", "s_rt") and _time(draft, directive, amount):
            continue
        if "gpu" in key and number(amount) and "_" not in key:
            draft.put("resources.gpus_per_node", int(amount), directive.at, f"-l {item}")
        draft.add_line("resources", item, directive.at)
    return True


_TAKERS: dict[str, Callable[[Draft, Directive], bool]] = {"slurm": _slurm, "pbs": _pbs, "grid_engine": _grid_engine}
