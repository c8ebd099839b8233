"""``allranks convert --verify``: what each rank of a script would be, and what each rank of its job file would be.

Both sides run in :mod:`allranks.convert.sandbox`, where all launchers are recorders, under the same allocation: the
script as its scheduler would start it, and what the plan of the job file would start.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from allranks.contract import DECIDED
from allranks.convert.draft import Draft, path_of, short
from allranks.convert.launchers import RANK_VARIABLES
from allranks.convert.recorder import HOST, LAUNCHERS, PARTS, PYTHON, VIA, WITHIN, find
from allranks.convert.recorder import PATH as LOGIN_PATH
from allranks.convert.sandbox import run
from allranks.lint.syntax import SYNTAX, Syntax
from allranks.lint.unwrap import MODULES
from allranks.plan.plan import Plan

Record = dict[str, Any]
#: Functions and commands that shells of the sandbox have: they leave their mark in the environment.
_SHELL = """\
module() {
  case $1 in load | add) shift; for each; do
    case $LOADEDMODULES: in *:$each:*) ;; *) export LOADEDMODULES+=:$each;; esac
  done;; purge) LOADEDMODULES=;; esac
}
ml() { case $1 in load | add | purge | use | unload | list) module "$@" ;; *) module load "$@" ;; esac; }
conda() { case $1 in activate) export CONDA_DEFAULT_ENV=${2:-base};; run) command conda "$@";; esac; }
mamba() { conda "$@"; }
micromamba() { conda "$@"; }
command_not_found_handle() { /.allranks/recorder --as "$@"; }
readonly -f module ml conda mamba micromamba command_not_found_handle
"""
_SHELL_FILE = "/.allranks-shell"
_MISSING = re.compile(r"([^\s:'‘]+)['’]?: (?:No such file or directory|Permission denied|cannot execute)")
#: Rounds in which paths that a script names and that are not here become stubs.
_ROUNDS = 6
_OF_SCHEDULERS = re.compile(
    r"(SLURM|SRUN|SBATCH|PBS|OMPI|PMI|PMIX|SGE|ALLRANKS|_ALLRANKS|_RECORDER|BASH_FUNC)_?.*|PE_HOSTFILE"
)
_OF_SHELLS = {
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "BASH_ENV",
    "HOSTNAME",
    "LINES",
    "COLUMNS",
    "LD_PRELOAD",
    "JOB_ID",
    "NSLOTS",
}
_OF_RANKS = {*RANK_VARIABLES, "MPI_LOCALRANKID", "NHOSTS", "NCPUS", "QUEUE"}
#: Where a rank's numbers are, by what started it: rank, local rank, world size.
_NUMBERS = {
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Difference:
    """What differs between a script and its job file."""

    what: str
    old: str
    new: str
    why: str  # Why that is as wanted; empty if nothing says so.


@dataclass(frozen=True)
class Verification:
    """What a comparison found."""

    ranks: int
    equal: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether each difference is as wanted."""
        return all(each.why for each in self.differences)

    @property
    def title(self) -> str:
        """What it comes to, in a line."""
        if not self.equal:
            return "not verified"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        verdict = "verified" if self.is_equal else "verified, with differences"
        return f"{verdict}: {ranks}, alike in {', '.join(self.equal)}"

    def lines(self) -> Iterator[str]:
        """Yield each difference, those that nothing explains first."""
        for each in sorted(self.differences, key=lambda each: bool(each.why)):
            verdict = "wanted" if each.why else "DIFFERS"
            yield f"  {verdict}: {each.what}: {short(each.old, 200)} -> {short(each.new, 200)}"
            if each.why:
                yield f"    {each.why}"


def verify(draft: Draft, data: bytes, plan: Plan, environ: Mapping[str, str], cwd: Path) -> Verification:
    """Compare what a script starts with what the plan of its job starts.

    Raises:
        SandboxError: there can be no sandbox here.
    """
    nodes = draft.view.resources.nodes or plan.nnodes
    named = draft.kind in ("ssh", "pdsh")
    machines = [socket.gethostname()]
    if named:
        machines = [each.host for each in plan.commands]
    is_batch = draft.kind in ("slurm", "pbs", "grid_engine")
    old = _Side(draft, environ, cwd, [f"node{at:02}" for at in range(1, nodes + 1)] if is_batch else machines)
    new = _Side(draft, environ, cwd, [f"node{at:02}" for at in range(1, plan.nnodes + 1)] if is_batch else machines)
    text = data.decode("utf-8", "surrogateescape")
    before, said = old.script(text)
    files = {f"{plan.run_dir}/{each.path}": each.text for each in plan.files}
    if draft.kind in ("ssh", "pdsh", "local"):
        lines = [shlex.join(each.command) for each in (*plan.before, *plan.commands)]
        files[f"{plan.run_dir}/all.sh"] = "".join(f"{line}\n" for line in dict.fromkeys(lines))
        command = ["bash", f"{plan.run_dir}/all.sh"]
    else:
        command = ["bash", plan.commands[0].command[-1]]
    new.stubs = old.stubs
    after, new_said = new.run(command, files, dict.fromkeys(plan.secrets, "x" * 16))
    return _compare(draft, plan, old.base, before, after, said, new_said)


class _Side:
    """Runs one side in the sandbox.

    Attributes:
        base: the variables that it starts with.
        stubs: paths that were named and are not here.
    """

    def __init__(self, draft: Draft, environ: Mapping[str, str], cwd: Path, hosts: Sequence[str]) -> None:
        self.draft, self.cwd, self.hosts = draft, cwd, [*hosts]
        self.files = {_SHELL_FILE: _SHELL}
        self.stubs = [sys.executable, *self._named()]
        self.resources = draft.view.resources
        self.cpus = int(draft.get("resources.cpus_per_node") or os.cpu_count() or 1)
        self.gpus = int(self.resources.gpus or draft.get("resources.gpus_per_node") or 0)
        kept = {name: value for name, value in environ.items() if not _OF_SCHEDULERS.fullmatch(name)}
        own = {"LC_ALL": "C", "BASH_ENV": _SHELL_FILE, HOST: self.hosts[0], "HOSTNAME": self.hosts[0]}
        path = ":".join(filter(None, [environ.get("PATH"), LOGIN_PATH]))
        self.base = {
            **kept,
            **own,
            "PATH": path,
            "HOME": environ.get("HOME") or "/",
            "USER": environ.get("USER", "user"),
        }
        self.is_batch = draft.kind in ("slurm", "pbs", "grid_engine") and bool(draft.view.script.read)
        if self.is_batch:
            self.base |= {"slurm": self._slurm, "pbs": self._pbs, "grid_engine": self._grid_engine}[draft.kind]()

    def script(self, text: str) -> tuple[list[Record], str]:
        """Run the script as its scheduler, or its user, starts it."""
        script, cwd = self.draft.view.script, self.cwd
        if not self.is_batch:
            return self.run(["bash", self.draft.path], {})
        path = {"slurm": "/var/spool/slurmd/job1/slurm_script", "pbs": "/var/spool/pbs/1.SC"}.get(self.draft.kind)
        path = path or "/var/spool/sge/1"
        home = not script.options("-cwd", "-wd") if self.draft.kind == "grid_engine" else self.draft.kind == "pbs"
        given = script.option("chdir") or script.option("-d") or script.option("-wd")
        start = Path(cwd, Path(given).expanduser()) if given else Path(self.base["HOME"]) if home else cwd
        return self.run(["bash", path], {path: text}, start=start)

    def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        more: Mapping[str, str] | None = None,
        start: Path | None = None,
    ) -> tuple[list[Record], str]:
        """Run a command until no path is missing any more; return what was recorded, and its last words."""
        options = {name: [sorted(each.valued), _other_names(each), each.attaches] for name, each in SYNTAX.items()}
        facts = {"hosts": self.hosts, "gpus": self.gpus, "cpus": self.cpus, "options": options, "modules": MODULES}
        facts["tasks"] = self.resources.processes or self.resources.tasks_per_node
        names = {each.name for each in self.draft.view.script.commands}
        for _ in range(_ROUNDS):
            found = run(
                command,
                cwd=str(start or self.cwd),
                environ={**self.base, **(more or {})},
                files={**self.files, **files},
                stubs=self.stubs,
                commands=sorted({*PARTS, "python", "python3", "sleep", *filter(_is_name, names)}),
                facts=facts,
            )
            missing = [path for path in self._missing(found["stderr"]) if path not in self.stubs]
            if not missing:
                break
            self.stubs = [*self.stubs, *dict.fromkeys(missing)]
        said = "it was ended by the limits of the sandbox" if found["late"] else found["stderr"].strip()
        return found["records"], said

    def _named(self) -> Iterator[str]:
        """Yield the absolute paths of programs, and of environments to be activated, that the script names."""
        for command in self.draft.view.script.commands:
            sourced = command.args[:1] if command.name in ("source", ".") else ()
            for word in (*command.words[:1], *sourced):
                path = str(Path(path_of(word) or "").expanduser())
                if not path.startswith("/") or path.startswith(("/bin/", "/usr/bin/", "/usr/local/bin/")):
                    continue
                if word in sourced and PurePath(path).name != "activate":
                    self.files |= {path: ""} if _is_start_file(path) or not Path(path).exists() else {}
                else:
                    yield path

    def _missing(self, stderr: str) -> Iterator[str]:
        """Yield the paths of programs, and of files to be sourced, that shells did not find or may not execute."""
        workdirs = {self.cwd, self.cwd / Path(self.draft.get("workdir") or ".").expanduser()}
        for path in _MISSING.findall(stderr):
            name = PurePath(path).name
            is_program = (
                name in PARTS or PYTHON.fullmatch(name) or name == "activate" or name.endswith((".sh", ".bash"))
            )
            if "/" in path and (is_program or os.access(path, os.X_OK)):
                yield from (os.path.normpath(each / path) for each in workdirs)

    def _slurm(self) -> dict[str, str]:
        script, nodes, per_node = self.draft.view.script, len(self.hosts), self.resources.tasks_per_node
        tasks = self.resources.tasks or (per_node * nodes if per_node and script.option("ntasks-per-node") else None)
        given = {
            **{
                "JOB_ID": 1,
                "JOBID": 1,
                "JOB_NAME": script.option("job-name") or "job",
                "SUBMIT_DIR": self.cwd,
                "PROCID": 0,
            },
            **{"NODEID": 0, "LOCALID": 0, "NNODES": nodes, "JOB_NUM_NODES": nodes, "CPUS_ON_NODE": self.cpus},
            **{
                "JOB_NODELIST": ",".join(self.hosts),
                "NODELIST": ",".join(self.hosts),
                "GPUS_ON_NODE": self.gpus or None,
            },
            **{"NTASKS": tasks, "NPROCS": tasks, "CPUS_PER_TASK": script.option("cpus-per-task")},
            **{"NTASKS_PER_NODE": script.option("ntasks-per-node"), "GPUS_PER_NODE": script.option("gpus-per-node")},
            "TASKS_PER_NODE": f"{per_node or 1}(x{nodes})" if nodes > 1 else per_node or 1,
            **({"ARRAY_TASK_ID": 0, "ARRAY_JOB_ID": 1} if script.option("array") else {}),
        }
        return {f"SLURM_{name}": str(value) for name, value in given.items() if value is not None} | self._devices()

    def _devices(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.gpus)))} if self.gpus else {}

    def _pbs(self) -> dict[str, str]:
        lines = [host for host in self.hosts for _ in range(self.resources.processes or 1)]
        file = "/var/spool/pbs/aux/1.server"
        self.files[file] = "".join(f"{line}\n" for line in lines)
        given = {"JOBID": "1.server", "NODEFILE": file, "O_WORKDIR": self.cwd, "ENVIRONMENT": "PBS_BATCH", "NODENUM": 0}
        given |= {"JOBNAME": "job", "NUM_NODES": len(self.hosts), "NUM_PPN": self.cpus, "O_HOME": self.base["HOME"]}
        if self.draft.view.script.options("-J", "-t"):
            given |= {"ARRAY_INDEX": 1, "ARRAYID": 1}
        return {f"PBS_{name}": str(value) for name, value in given.items()} | self._devices()

    def _grid_engine(self) -> dict[str, str]:
        slots = sum(
            int(each.value.split()[-1]) for each in self.draft.view.script.options("-pe") if each.value[-1:].isdecimal()
        )
        file = "/var/spool/sge/pe_hostfile"
        each = max(1, slots // len(self.hosts))
        self.files[file] = "".join(f"{host} {each} gpu.q@{host} UNDEFINED\n" for host in self.hosts)
        given = {
            "JOB_ID": 1,
            "PE_HOSTFILE": file,
            "NSLOTS": slots or 1,
            "NHOSTS": len(self.hosts),
            "SGE_O_WORKDIR": self.cwd,
        }
        given["SGE_TASK_ID"] = 1 if self.draft.view.script.options("-t") else "undefined"
        return {name: str(value) for name, value in given.items()} | self._devices()


def _other_names(syntax: Syntax) -> dict[str, str]:
    """Return other names of options with the usual ones; for torchrun also the beginnings that are enough."""
    known = syntax.valued | syntax.flags if syntax.abbreviates and not syntax.attaches else ()
    begun = {name[:end] for name in known for end in range(len("--x"), len(name))}
    return {**{name: syntax.canonical(name) for name in begun}, **syntax.same}


def _is_start_file(path: str) -> bool:
    """Return whether a file is one of a user's shell, which a job does not read."""
    return PurePath(path).name in (".bashrc", ".bash_profile", ".profile")


def _is_name(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.+-]+", name)) and name not in (
        "source",
        "export",
        "cd",
        "exit",
        "set",
        "wait",
        ".",
        "conda",
    )


def _started(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the records of ranks, and the others: a launcher's, else those that srun, ssh, … started, else one."""
    for is_rank in (
        lambda each: each["env"].get(VIA) in (*LAUNCHERS, *MODULES.values()),
        lambda each: VIA in each["env"] and each["kind"] != "binary",
        lambda each: VIA in each["env"],
    ):
        if found := [each for each in records if is_rank(each)]:
            return found, [each for each in records if each not in found]
    programs = [each for each in records if each["kind"] != "binary"][-1:]
    return programs, [each for each in records if each not in programs]


def _numbers(record: Record) -> tuple[int, int, int]:
    """Return rank, local rank and world size."""
    env = record["env"]
    names = _NUMBERS.get(env.get(VIA, ""), _TORCH)
    values = [env.get(name, otherwise) for name, otherwise in zip(names, "001", strict=True)]
    rank, local, world = (int(value) if value.isdecimal() else 0 for value in values)
    return rank, local, world


def _changed(record: Record, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank has and its job did not start with; without those that every launcher sets."""
    found = {}
    for name, value in record["env"].items():
        if name == "PYTHONPATH":
            value = re.sub(r"[^:]*/runs/[^:/]+/code(:|$)", "", value)
        is_own = _OF_SCHEDULERS.fullmatch(name) or name in _OF_SHELLS or name in _OF_RANKS
        is_own = is_own or (name == "PATH" and value == LOGIN_PATH)
        if value and not is_own and base.get(name) != value:
            found[name] = value
    return found


def _compare(
    draft: Draft,
    plan: Plan,
    base: Mapping[str, str],
    before: Sequence[Record],
    after: Sequence[Record],
    said: str,
    new_said: str,
) -> Verification:
    old, old_others = _started(before)
    new = [each for each in after if each["env"].get(VIA) == "allranks"]
    new_others = [each for each in after if each not in new]
    old, further = _of_one_training(old, new)
    found = _Comparison(draft, plan, base)
    if not old or not new:
        last = (said if not old else new_said).rpartition("\n")[2]
        what = "ranks" if old or new else "ranks, of both"
        found.differ(what, f"{len(old)}", f"{len(new)}; {last}" if last else f"{len(new)}", "")
        return Verification(len(old), (), tuple(found.differences))
    one, other = sorted(old, key=_numbers), sorted(new, key=_numbers)
    found.ranks(one, other)
    moved = found.note(("changed", "not taken over"), "cd ")
    found.each("working directory", one, other, lambda each: each["cwd"], moved)
    found.each("interpreter", one, other, _interpreter, found.interpreter(one[0], other[0]))
    found.each(
        "container", one, other, lambda each: each["env"].get(WITHIN, ""), found.note(("not taken over",), "container")
    )
    found.each("program", one, other, lambda each: f"{each['kind']} {each['path']}", moved)
    found.each("arguments", one, other, lambda each: shlex.join(each["args"]), found.arguments())
    found.environment(one, other)
    found.others([*old_others, *further], new_others)
    return Verification(len(new), tuple(found.equal), tuple(found.differences))


def _of_one_training(old: Sequence[Record], new: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the ranks of the training that is converted, those with the new one's words, and those of others."""
    words = [(each["kind"], each["path"], each["args"]) for each in new]
    for most in (3, 2):
        same = [
            each for each in old if (each["kind"], each["path"], each["args"])[:most] in [each[:most] for each in words]
        ]
        numbers = [(_numbers(each), each["host"]) for each in same]
        if same and len(set(map(str, numbers))) == len(numbers):
            return same, [each for each in old if each not in same]
    return [*old], []


def _interpreter(record: Record) -> str:
    """Return the command line of the interpreter; its output is never buffered by allranks."""
    words = [word for word in record["python"] if word != "-u"]
    if words and "/" in words[0]:
        words[0] = re.sub(r"/python[\d.]*$", "/python", words[0])
    return shlex.join(words)


class _Comparison:
    """Collects what agrees and what differs."""

    def __init__(self, draft: Draft, plan: Plan, base: Mapping[str, str]) -> None:
        self.draft, self.plan, self.base = draft, plan, base
        #: Those that a script starts with.
        self.paths = (base["PATH"], LOGIN_PATH)
        self.equal: list[str] = []
        self.differences: list[Difference] = []

    def differ(self, what: str, old: str, new: str, why: str) -> None:
        self.differences.append(Difference(what, old or "nothing", new or "nothing", why))

    def note(self, kinds: Sequence[str], *words: str) -> str:
        """Return what convert says of a part of the script that has one of these words; empty if it says nothing."""
        notes = (each for each in self.draft.notes if each.kind in kinds)
        return next((f"{each.kind}: {each.what}" for each in notes if any(word in each.what for word in words)), "")

    def each(
        self, what: str, old: Sequence[Record], new: Sequence[Record], of: Callable[[Record], str], why: str
    ) -> None:
        """Compare one thing of each rank, by its number; of ranks that are not on both sides nothing."""
        there = {_numbers(each)[0]: of(each) for each in new}
        pairs = [(_numbers(each)[0], of(each), there[_numbers(each)[0]]) for each in old if _numbers(each)[0] in there]
        wrong = next(((rank, one, other) for rank, one, other in pairs if one != other), None)
        if wrong is None:
            self.equal += [what] if any(one for _, one, _ in pairs) else []
        else:
            self.differ(f"{what} of rank {wrong[0]}", wrong[1], wrong[2], why)

    def ranks(self, old: Sequence[Record], new: Sequence[Record]) -> None:
        """Compare how many ranks there are, on which hosts, and their numbers."""
        one, other = (sorted((*_numbers(each), each["host"]) for each in side) for side in (old, new))
        if one == other:
            self.equal.append("rank, local rank, world size and host")
        else:
            why = next((each.what for each in self.draft.notes if re.match(r"AR\d", each.what)), "")
            lost = (
                "not known here",
                "number of nodes",
                "machines are not",
                "if it starts ranks by itself",
                "this machine",
            )
            self.differ("ranks", _of_ranks(one), _of_ranks(other), why or self.note(("not taken over",), *lost))
        meeting = [
            {f"{each['env'].get('MASTER_ADDR')}:{each['env'].get('MASTER_PORT')}" for each in side}
            for side in (old, new)
        ]
        if meeting[0] - {"None:None"} and meeting[0] != meeting[1]:
            why = next((f"{each.value}: {each.why}" for each in self.plan.reasons if each.subject == "master"), "")
            new_place = "chosen when it starts"
            self.differ(
                "address and port", ", ".join(sorted(meeting[0])), new_place, why or "allranks finds address and port"
            )

    def interpreter(self, old: Record, new: Record) -> str:
        """Return why another interpreter is as wanted: neither the script nor the job file chose one."""
        first = {
            find(name, {**self.base, "PATH": path}, "/")
            for name in ("python", "python3", *LAUNCHERS)
            for path in self.paths
        }
        first = {re.sub(r"/[^/]+$", "/python", path) for path in first}
        if _interpreter(old).split(" ")[0] not in first or self.draft.get("environment.python"):
            return ""
        reasons = (each.why for each in self.plan.reasons if each.subject == "python")
        return f"the script took the first on PATH; now it is {next(reasons, '')}"

    def arguments(self) -> str:
        """Return why other arguments are known to the user."""
        return self.note(("not taken over",), "its value is not in the script", "own arguments", "--local_rank")

    def environment(self, old: Sequence[Record], new: Sequence[Record]) -> None:
        """Compare the variables that the script sets, one by one."""
        there = {_numbers(each)[0]: _changed(each, self.base) for each in new}
        names: dict[str, tuple[str, str]] = {}
        equal: set[str] = set()
        decided = {name for each in new for name in each["env"].get(DECIDED, "").split()}
        for each in old:
            one, other = _changed(each, self.base), there.get(_numbers(each)[0])
            if other is None:
                continue
            for name in {*one, *other}:
                if one.get(name) == other.get(name):
                    equal.add(name)
                else:
                    names.setdefault(name, (one.get(name, ""), other.get(name, "")))
        if shown := sorted(equal - names.keys()):
            self.equal.append(f"environment ({', '.join(shown)})")
        for name, (one_value, other_value) in sorted(names.items()):
            if name in decided and not one_value:
                continue  # torchrun decides about threads in the ranks, too late for this to see.
            why = self.note(("changed", "left out", "not taken over"), f"{name}=", f" {name} ")
            given = self.draft.get(f"environment.variables.{name}")
            if given == "<secret>":
                one_value, other_value, why = "<secret>", "<secret>", "its value comes from where you type allranks run"
            self.differ(f"variable {name}", one_value, other_value, why)

    def others(self, old: Iterable[Record], new: Iterable[Record]) -> None:
        """Compare the other commands that are run: before, beside and after the training."""
        one, other = ({shlex.join([each["path"], *each["args"]]) for each in side} for side in (old, new))
        for command in sorted(one - other):
            name = PurePath(shlex.split(command)[0]).name
            self.differ("another command", command, "", self.note(("changed", "left out", "not taken over"), name))
        for command in sorted(other - one):
            self.differ("another command", "", command, "")


def _of_ranks(ranks: Sequence[tuple[int, int, int, str]]) -> str:
    """Return ranks in words."""
    hosts = dict.fromkeys(host for *_, host in ranks)
    each = ", ".join(f"{host}: {' '.join(str(rank) for rank, *_, at in ranks if at == host)}" for host in hosts)
    return f"{len(ranks)} of {ranks[0][2]} ({each})"
