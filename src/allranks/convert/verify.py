"""``allranks convert --verify``: what each rank of a script would be, and what each rank of its job file would be.

Both sides run in :mod:`allranks.convert.sandbox`, where all launchers are recorders, under the same allocation: the
script as its scheduler would start it, and what the plan of the job file would start.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from allranks.convert.compare import Record, Verification, compare
from allranks.convert.csh import as_bash
from allranks.convert.draft import Draft, path_of
from allranks.convert.recorder.common import FIRST, HOST, part_of
from allranks.convert.recorder.common import PATH as LOGIN_PATH
from allranks.convert.recorder.main import COMMANDS
from allranks.convert.sandbox import run
from allranks.convert.unmet import OF_SCHEDULERS
from allranks.lint.model import Word
from allranks.lint.syntax import SYNTAX, Syntax
from allranks.lint.unwrap import MODULES
from allranks.plan.plan import Plan
from allranks.system.hostlist import expand

#: Functions and commands that shells of the sandbox have: they leave their mark in the environment.
_SHELL = """\
module() {
  case $1 in load | add) shift; for each; do
    case ${LOADEDMODULES-}: in *:$each:*) ;; *) export LOADEDMODULES+=:$each;; esac
  done;; purge) LOADEDMODULES=;; esac
}
ml() { case $1 in load | add | purge | use | unload | list) module "$@" ;; *) module load "$@" ;; esac; }
conda() { case $1 in activate) export CONDA_DEFAULT_ENV=${2:-base};; run) command conda "$@";; esac; }
mamba() { conda "$@"; }
micromamba() { conda "$@"; }
date() { command date -d @1700000000 "$@"; }
ulimit() { :; }
command_not_found_handle() { /.allranks/recorder --as "$@"; }
readonly -f ulimit module ml conda mamba micromamba command_not_found_handle
"""
_SHELL_FILE = "/.allranks-shell"
_MISSING = re.compile(r"([^\s:'‘]+)['’]?: (?:No such file or directory|Permission denied|cannot execute)")
_NO_DIRECTORY = re.compile(r": line \d+: cd: (.+): No such file or directory$", re.MULTILINE)
_NO_TARGET = re.compile(r": line \d+: (.+): No such file or directory$", re.MULTILINE)
#: Rounds in which paths that a script names and that are not here become stubs.
_ROUNDS = 6


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
    hosts: list[str] = []
    with suppress(ValueError):  # It is checked where a job is planned.
        hosts += expand(draft.view.script.option("nodelist") or "")
    hosts += [f"node{at:02}" for at in range(1, max(nodes, plan.nnodes) + 1)]
    old = _Side(draft, environ, cwd, hosts[:nodes] if is_batch else machines)
    new = _Side(draft, environ, cwd, hosts[: plan.nnodes] if is_batch else machines)
    script = as_bash(draft.path, data)
    if script != data:
        old.files[str(cwd / draft.path)] = script.decode("utf-8", "surrogateescape")
    before, said = old.script(script.decode("utf-8", "surrogateescape"))
    files = {f"{plan.run_dir}/{each.path}": each.text for each in plan.files}
    if draft.kind in ("ssh", "pdsh", "local"):
        lines = [shlex.join(each.command) for each in (*plan.before, *plan.commands)]
        files[f"{plan.run_dir}/all.sh"] = "".join(f"{line}\n" for line in dict.fromkeys(lines))
        command = ["bash", f"{plan.run_dir}/all.sh"]
    else:
        command = ["bash", plan.commands[0].command[-1]]
    new.stubs = old.stubs
    after, new_said = new.run(command, files, dict.fromkeys(plan.secrets, "x" * 16))
    lacking = [path for path in old.stubs if path.endswith((".sh", ".bash")) and not old.is_sourced(path)]
    return compare(
        draft, plan, old.base, before, after, said, new_said, [path for path in lacking if not Path(path).exists()]
    )


class _Side:
    """Runs one side in the sandbox.

    Attributes:
        base: the variables that it starts with.
        stubs: paths that were named and are not here; directories end with a slash.
    """

    def __init__(self, draft: Draft, environ: Mapping[str, str], cwd: Path, hosts: Sequence[str]) -> None:
        self.draft, self.cwd, self.hosts = draft, cwd, [*hosts]
        self.files = {_SHELL_FILE: _SHELL}
        self.stubs = [sys.executable, *self._named()]
        commands = draft.view.script.commands
        #: What the script sources, and how the files may be called that it writes its output to.
        self.sourced = {word.shown for each in commands if each.name in ("source", ".") for word in each.args[:1]}
        self.targets = [*_targets(draft.view.script.redirects)]
        self.resources = draft.view.resources
        self.cpus = int(draft.get("resources.cpus_per_node") or os.cpu_count() or 1)
        self.gpus = int(self.resources.gpus or draft.get("resources.gpus_per_node") or 0)
        kept = {name: value for name, value in environ.items() if not OF_SCHEDULERS.fullmatch(name)}
        own = {"LC_ALL": "C", "BASH_ENV": _SHELL_FILE, HOST: self.hosts[0], "HOSTNAME": self.hosts[0]}
        path = ":".join(filter(None, [FIRST, environ.get("PATH"), LOGIN_PATH]))
        home, user = environ.get("HOME") or "/", environ.get("USER", "user")
        self.base = {**kept, **own, "PATH": path, "HOME": home, "USER": user}
        self.is_batch = draft.kind in ("slurm", "pbs", "grid_engine") and bool(draft.get("cluster"))
        if self.is_batch:
            self.base |= {"slurm": self._slurm, "pbs": self._pbs, "grid_engine": self._grid_engine}[draft.kind]()

    def script(self, text: str) -> tuple[list[Record], str]:
        """Run the script as its scheduler, or its user, starts it."""
        script, cwd = self.draft.view.script, self.cwd
        if not self.is_batch:
            rank, number = self.draft.node_rank, "0"
            words = list(self.draft.arguments)
            if rank.isdecimal() and int(rank) > len(words):
                words += [number] * (int(rank) - len(words))
            return self.run(
                ["bash", self.draft.path, *words], {}, {rank: number} if rank and not rank.isdecimal() else {}
            )
        path = {"slurm": "/var/spool/slurmd/job1/slurm_script", "pbs": "/var/spool/pbs/1.SC"}.get(self.draft.kind)
        path = path or "/var/spool/sge/1"
        home = not script.options("-cwd", "-wd") if self.draft.kind == "grid_engine" else self.draft.kind == "pbs"
        given = script.option("chdir") or script.option("-d") or script.option("-wd")
        start = Path(cwd, Path(given).expanduser()) if given else Path(self.base["HOME"]) if home else cwd
        return self.run(["bash", path, *self.draft.arguments], {path: text}, start=start)

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
        facts["seen_gpus"] = self.gpus or int(not self.is_batch)  # Where there is none, the job has one rank.
        facts["tasks"] = self.resources.processes or self.resources.tasks_per_node
        names = {each.name for each in self.draft.view.script.commands}
        for _ in range(_ROUNDS):
            found = run(
                command,
                cwd=str(start or self.cwd),
                environ={**self.base, **(more or {})},
                files={**self.files, **files},
                stubs=self.stubs,
                commands=sorted({*COMMANDS, "python3", *filter(_is_name, names)}),
                facts=facts,
            )
            missing = [path for path in self._missing(found["stderr"]) if path not in self.stubs]
            if not missing:
                break
            self.stubs = [*self.stubs, *dict.fromkeys(missing)]
        said = found["stderr"].strip()
        if all(line.startswith("+") for line in said.splitlines()):  # Nothing, or what set -x shows.
            said = found["stdout"].strip() or said
        said = "it was ended by the limits of the sandbox" if found["late"] else said
        return found["records"], said

    def is_sourced(self, path: str) -> bool:
        """Return whether the script sources a file of this name."""
        return PurePath(path).name in {PurePath(each).name for each in self.sourced}

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
            is_program = part_of(name) or name == "activate" or name.endswith((".sh", ".bash"))
            if path in self.sourced or ("/" in path and (is_program or os.access(path, os.X_OK))):
                yield from (os.path.normpath(each / path) for each in workdirs)
        folders = [*_NO_DIRECTORY.findall(stderr)]
        for path in _NO_TARGET.findall(stderr):
            if any(fnmatchcase(path, each) for each in self.targets):
                folders.append(str(PurePath(path).parent))
        for folder in folders:
            yield from (f"{os.path.normpath(each / folder)}/" for each in workdirs)

    def _slurm(self) -> dict[str, str]:
        script, nodes, per_node = self.draft.view.script, len(self.hosts), self.resources.tasks_per_node
        tasks = self.resources.tasks or (per_node * nodes if per_node and script.option("ntasks-per-node") else None)
        hosts = ",".join(self.hosts)
        given = {
            **dict.fromkeys(("JOB_ID", "JOBID"), 1),
            **dict.fromkeys(("PROCID", "NODEID", "LOCALID"), 0),
            **dict.fromkeys(("NNODES", "JOB_NUM_NODES"), nodes),
            **dict.fromkeys(("JOB_NODELIST", "NODELIST"), hosts),
            **dict.fromkeys(("NTASKS", "NPROCS"), tasks),
            **{"JOB_NAME": script.option("job-name") or "job", "SUBMIT_DIR": self.cwd, "CPUS_ON_NODE": self.cpus},
            **{"GPUS_ON_NODE": self.gpus or None, "CPUS_PER_TASK": script.option("cpus-per-task")},
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
        given = {"JOB_ID": 1, "PE_HOSTFILE": file, "NSLOTS": slots or 1, "NHOSTS": len(self.hosts)}
        given["SGE_O_WORKDIR"] = self.cwd
        given["SGE_TASK_ID"] = 1 if self.draft.view.script.options("-t") else "undefined"
        return {name: str(value) for name, value in given.items()} | self._devices()


def _other_names(syntax: Syntax) -> dict[str, str]:
    """Return other names of options with the usual ones; for torchrun also the beginnings that are enough."""
    known = syntax.valued | syntax.flags if syntax.abbreviates and not syntax.attaches else ()
    begun = {name[:end] for name in known for end in range(len("--x"), len(name))}
    return {**{name: syntax.canonical(name) for name in begun}, **syntax.same}


def _targets(redirects: Iterable[tuple[str, Word]]) -> Iterator[str]:
    """Yield what the files may be called that a script writes its output to, as patterns of :mod:`fnmatch`."""
    for operator, word in redirects:
        if ">" in operator:
            yield "".join("*" if part.value is None else glob.escape(part.value) for part in word.parts)


def _is_start_file(path: str) -> bool:
    """Return whether a file is one of a user's shell, which a job does not read."""
    return PurePath(path).name in (".bashrc", ".bash_profile", ".profile")


def _is_name(name: str) -> bool:
    of_shells = {"source", "export", "cd", "exit", "set", "wait", ".", "conda"}
    return bool(re.fullmatch(r"[\w.+-]+", name)) and name not in of_shells
