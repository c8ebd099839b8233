"""Compares what the ranks of a script would be with what those of its job file would be, from the sandbox's records."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from allranks.contract import DECIDED
from allranks.convert.draft import Draft, short
from allranks.convert.launchers import RANK_VARIABLES
from allranks.convert.recorder.common import LAUNCHERS, VIA, WITHIN, find
from allranks.convert.recorder.common import PATH as LOGIN_PATH
from allranks.convert.unmet import OF_SCHEDULERS, last_line, unmet_arguments, why_differs, why_no_job, why_none
from allranks.lint.unwrap import MODULES
from allranks.plan.plan import Plan

Record = dict[str, Any]
_SHELL_NAMES = "PWD OLDPWD SHLVL _ BASH_ENV HOSTNAME LINES COLUMNS LD_PRELOAD JOB_ID NSLOTS"
_OF_SHELLS = frozenset(_SHELL_NAMES.split())
_OF_RANKS = {*RANK_VARIABLES, "MPI_LOCALRANKID", "NHOSTS", "NCPUS", "QUEUE"}
#: Where a rank's numbers are, by what started it: rank, local rank, world size.
_NUMBERS = {
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
#: Faults that change which ranks start: of processes, rendezvous, directives and remote shells.
_FAULT_OF_RANKS = re.compile(r"AR(10\d|11[4-9]|120|213|214|30[3-8]|327|40[1-6]|41[2-69]|426|427|60[1-6]|81[015])\b")


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
    cause: str = ""  # Why the script could not be compared; empty if it was, or if nothing says why.
    fix: str = ""  # What to type then.

    @property
    def is_equal(self) -> bool:
        """Whether each difference is as wanted."""
        return all(each.why for each in self.differences)

    @property
    def title(self) -> str:
        """What it comes to, in a line."""
        if self.cause or not self.equal:
            return f"not verified: {self.cause}" if self.cause else "not verified"
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


def _started(records: Sequence[Record], launcher: str, new: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the records of ranks, and the others: a launcher's, else those that srun, ssh, … started, else one.

    Args:
        records: of all that was started.
        launcher: of the script's training; where it has one, another program that a plain Python runs is no rank.
        new: the ranks of its job.
    """
    for is_rank in (
        lambda each: each["env"].get(VIA) in (*LAUNCHERS, *MODULES.values()),
        lambda each: VIA in each["env"] and each["kind"] != "binary",
        lambda each: VIA in each["env"],
    ):
        if found := [each for each in records if is_rank(each)]:
            return found, [each for each in records if each not in found]
    programs = [each for each in records if each["kind"] != "binary"]
    wanted = [(each["kind"], each["path"]) for each in new]
    alike = [each for each in programs if (each["kind"], each["path"]) in wanted]
    if launcher and not alike:
        return [], [*records]
    given = [each["args"] for each in new if each["args"]]
    same = [each for each in alike or programs if each["args"] in given]
    program = (same or alike or programs)[-1:]
    return program, [each for each in records if each not in program]


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
        is_own = OF_SCHEDULERS.fullmatch(name) or name in _OF_SHELLS or name in _OF_RANKS
        is_own = is_own or (name == "PATH" and value == LOGIN_PATH)
        if value and not is_own and base.get(name) != value:
            found[name] = value
    return found


def compare(
    draft: Draft,
    plan: Plan,
    base: Mapping[str, str],
    before: Sequence[Record],
    after: Sequence[Record],
    said: str,
    new_said: str,
    lacking: Sequence[str],
) -> Verification:
    """Compare the records of a script with those of its job.

    Args:
        draft: what the script was read as.
        plan: of the job.
        base: the variables that both started with.
        before: the records of the script.
        after: those of the job.
        said: the last words of the script.
        new_said: those of the job.
        lacking: scripts that it runs, and that are not here.
    """
    new = [each for each in after if each["env"].get(VIA) == "allranks"]
    old, old_others = _started(before, draft.launcher, new)
    new_others = [each for each in after if each not in new]
    old, further = _of_one_training(old, new)
    found = _Comparison(draft, plan, base)
    if not old or not new:
        side, text = ("job", new_said) if old else ("script", said)
        last = last_line(text)
        what = "ranks" if old or new else "ranks, of both"
        printed = f"; the {side}'s last output: {last}" if last else ""
        found.differ(what, f"{len(old)}", f"{len(new)}{printed}", "")
        cause, fix = (why_no_job(new_said), "") if old else why_none(draft, base, said, lacking, before)
        return Verification(len(old), (), tuple(found.differences), cause, fix)
    one, other = sorted(old, key=_numbers), sorted(new, key=_numbers)
    moved = found.note(("changed", "not taken over"), "cd ")
    is_before = any(each["kind"] == "binary" for each in old)
    before_it = found.note(("not taken over",), "it stood before the launcher") if is_before else ""
    found.ranks(one, other, before_it)
    found.each("working directory", one, other, lambda each: each["cwd"], moved)
    found.each("interpreter", one, other, _interpreter, before_it or found.interpreter(one[0], other[0]))
    found.each(
        "container", one, other, lambda each: each["env"].get(WITHIN, ""), found.note(("not taken over",), "container")
    )
    found.each(
        "program", one, other, lambda each: f"{each['kind']} {each['path']}", moved or before_it or found.program()
    )
    found.each("arguments", one, other, lambda each: shlex.join(each["args"]), found.arguments() or before_it)
    found.each("files that the arguments name", one, other, _files, before_it)
    found.environment(one, other, before_it)
    found.others([*old_others, *further], new_others, {each["path"] for each in new})
    cause = "" if all(each.why for each in found.differences) else why_differs(draft, base)
    return Verification(len(new), tuple(found.equal), tuple(found.differences), cause)


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


def _files(record: Record) -> str:
    """Return the files that the arguments name, with their checksums."""
    return ", ".join(f"{name} ({checksum})" for name, checksum in record["files"].items())


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

    def ranks(self, old: Sequence[Record], new: Sequence[Record], before_it: str) -> None:
        """Compare how many ranks there are, on which hosts, and their numbers; ``before_it``: why others may start."""
        one, other = (sorted((*_numbers(each), each["host"]) for each in side) for side in (old, new))
        if one == other:
            self.equal.append("rank, local rank, world size and host")
        else:
            why = next((each.what for each in self.draft.notes if _FAULT_OF_RANKS.match(each.what)), "")
            lost = ("not known here", "number of nodes", "machines are not", "if it starts ranks by itself")
            why = why or self.note(("not taken over",), *lost, "this machine", "the loop over") or before_it
            self.differ("ranks", _of_ranks(one), _of_ranks(other), why)
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
            return self.note(("not taken over",), "environment.python")
        reasons = (each.why for each in self.plan.reasons if each.subject == "python")
        return f"the script took the first on PATH; now it is {next(reasons, '')}"

    def program(self) -> str:
        """Return why another program is known to the user: its path has a variable of the script, and no argument."""
        return "" if unmet_arguments(self.draft) else self.note(("not taken over",), "its value is not in the script")

    def arguments(self) -> str:
        """Return why other arguments are known to the user."""
        return self.note(
            ("not taken over",),
            "its value is not in the script",
            "its default is not known",
            "own arguments",
            "--local_rank",
        )

    def environment(self, old: Sequence[Record], new: Sequence[Record], before_it: str) -> None:
        """Compare the variables that the script sets, one by one; ``before_it``: why ranks may have others."""
        there = {_numbers(each)[0]: _changed(each, self.base) for each in new}
        names: dict[str, tuple[str, str]] = {}
        equal: set[str] = set()
        decided = {name for each in new for name in each["env"].get(DECIDED, "").split()}
        for each in old:
            one, other = _changed(each, self.base), there.get(_numbers(each)[0])
            if other is None:
                continue
            for name in {*one, *other}:
                if _places(name, one) == _places(name, other):
                    equal.add(name)
                else:
                    names.setdefault(name, (one.get(name, ""), other.get(name, "")))
        if shown := sorted(equal - names.keys()):
            self.equal.append(f"environment ({', '.join(shown)})")
        for name, (one_value, other_value) in sorted(names.items()):
            if (name in decided and not one_value) or name == self.draft.node_rank:
                continue  # torchrun decides about threads in the ranks, too late for this to see. A rank was given.
            why = self.note(("changed", "left out", "not taken over"), f"{name}=", f" {name} ") or before_it
            if name == "CONDA_DEFAULT_ENV":
                why = why or self.note(("not taken over",), "environment.conda")
            given = self.draft.get(f"environment.variables.{name}")
            if given == "<secret>":
                one_value, other_value, why = "<secret>", "<secret>", "its value comes from where you type allranks run"
            self.differ(f"variable {name}", one_value, other_value, why)

    def others(self, old: Iterable[Record], new: Iterable[Record], programs: Collection[str]) -> None:
        """Compare the other commands that are run: before, beside and after the training of one of these programs."""
        one, other = ({shlex.join([each["path"], *each["args"]]) for each in side} for side in (old, new))
        for command in sorted(one - other):
            path = shlex.split(command)[0]
            why = self.note(("changed", "left out", "not taken over"), PurePath(path).name)
            why = why or (self.note(("not taken over",), "the loop over") if path in programs else "")
            self.differ("another command", command, "", why)
        for command in sorted(other - one):
            self.differ("another command", "", command, "")


def _places(name: str, env: Mapping[str, str]) -> str | list[str] | None:
    """Return the value of a variable; of a search path its directories, of which a later one of the same counts not."""
    value = env.get(name)
    return [*dict.fromkeys(value.split(":"))] if value and name.endswith("PATH") else value


def _of_ranks(ranks: Sequence[tuple[int, int, int, str]]) -> str:
    """Return ranks in words."""
    hosts = dict.fromkeys(host for *_, host in ranks)
    each = ", ".join(f"{host}: {' '.join(str(rank) for rank, *_, at in ranks if at == host)}" for host in hosts)
    return f"{len(ranks)} of {ranks[0][2]} ({each})"
