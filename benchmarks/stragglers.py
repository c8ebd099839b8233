"""How often a straggler is named: of a thousand quiet simulated runs, of 200 with a slow rank, and of real trainings.

The bars are 0, and 95 % with the right rank for the right reason. The real trainings have a rank on each of two or
three nodes, which are namespaces (``tests/cluster/nodes.py``: as root), and are slow by injection: processes take the
CPU of a rank, its data comes late, or ``tc`` makes the link of its node slow; or nothing does. Most of a step is a
timed wait, so that several run at once; those in which ranks compute run alone. ``--real N``: so many of each kind.

Trials are counted apart during which others used more than a quarter of the machine: there a rank may truly be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from harness import PYTHON

from allranks.record.steptime import NEWEST
from allranks.runs.steptime import of_start, read
from allranks.runs.stragglers import Straggler, explained, find

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = map(str, (TESTS, TESTS / "cluster", TESTS / "unit" / "runs"))

from nodes import Network, why_no_nodes  # noqa: E402
from simulated_steps import missed, named_in_quiet  # noqa: E402

QUIET, SLOW = 1000, 200
#: What is injected, and for what a rank is to be named. A rank whose CPU is taken is to wait for a CPU as well.
KINDS = {"cpu": "compute", "data": "data", "link": "exchange", "quiet": None}
#: Labs of three nodes each, in which trials run at the same time.
LABS = 3
#: Of the machine, so much that others use during a trial counts as load.
LOAD = 0.25
TICKS = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)


class Lab:
    """Three nodes that wait for trials, each with an interpreter that has imported torch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._port = folder, 29500
        self.network = Network(folder, [f"node{number:02d}" for number in range(3)])
        self.network.start()
        command, environ = [PYTHON, str(Path(__file__).with_name("trial_node.py"))], {"OMP_NUM_THREADS": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | environ}
        with (folder / "errors").open("w") as errors:
            nodes = enumerate(self.network.nodes.values())
            self._nodes = [node.popen([*command, str(rank)], stderr=errors, **pipes) for rank, node in nodes]

    def train(self, trial: dict[str, Any]) -> list[Straggler]:
        """Run a trial, and return the stragglers that are named at its end."""
        self._port += 1
        attempt = self._folder / f"{trial['kind']}-{trial['number']}"
        master = next(iter(self.network.nodes.values())).ip
        for node in self._nodes:
            node.stdin.write(json.dumps({**trial, "folder": str(attempt), "master": master, "port": self._port}) + "\n")
            node.stdin.flush()
        codes = [node.stdout.readline() for node in self._nodes]
        if {*codes} != {"0\n"}:
            raise RuntimeError(f"a rank of {trial} failed: {codes}\n{(self._folder / 'errors').read_text()[-3000:]}")
        ranks = of_start(read(attempt, newest=NEWEST))
        return explained([one for one in find(ranks) if one.is_current], ranks, attempt)[0]


class Result(NamedTuple):
    """A trial, what was named, and which part of the machine others used meanwhile."""

    trial: dict[str, Any]
    found: list[Straggler]
    load: float

    @property
    def is_right(self) -> bool:
        """Whether what is named is what was injected."""
        cause = KINDS[self.trial["kind"]]
        has_evidence = self.trial["kind"] != "cpu" or all(one.queued > 0 for one in self.found)
        named = [(one.ranks, one.phase) for one in self.found]
        return has_evidence and named == ([((self.trial["odd"],), cause)] if cause else [])


def trial_of(kind: str, number: int) -> dict[str, Any]:
    """Return a trial: how long a step computes and waits, and how slow the odd rank is."""
    dice = random.Random(f"{kind} {number}")
    # Where a CPU is taken ranks compute, two of them, with a CPU each; and in some of the quiet trials.
    computes = kind == "cpu" or (kind == "quiet" and number % 4 == 0)
    ranks = 2 if computes else 3
    return {
        "kind": kind,
        "number": number,
        "odd": dice.randrange(ranks),
        "ranks": ranks,
        "computes": computes,
        "seconds": 0.01 if computes else dice.uniform(0.01, 0.03),
        "noise": dice.uniform(0.02, 0.2),
        "data": dice.choice([0.0, 0.005]),
        "delay": dice.uniform(0.02, 0.06),
        "rate": dice.uniform(15, 40),
        "size": 1 << (15 if kind == "link" else 12),
        "steps": 40 if kind == "link" else 70,
    }


def used() -> tuple[float, float, float]:
    """Return the time, the parts of this machine's CPUs that all have used by then, and that we have."""
    everyone = sum(map(int, Path("/proc/stat").read_text().split()[1:9]))
    idle = sum(map(int, Path("/proc/stat").read_text().split()[4:6]))
    parents, ticks = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    return (
        time.monotonic(),
        (everyone - idle) / TICKS,
        sum(ticks[pid] for pid in ticks if is_ours(pid, parents)) / TICKS,
    )


def is_ours(pid: int, parents: dict[int, int]) -> bool:
    """Return whether a process is this one, or descends from it."""
    while pid and pid != os.getpid():
        pid = parents.get(pid, 0)
    return pid != 0


def run(trial: dict[str, Any], labs: SimpleQueue[Lab]) -> Result:
    """Run a trial in a lab that is free."""
    lab = labs.get()
    began, all_before, ours_before = used()
    try:
        found = lab.train(trial)
    finally:
        labs.put(lab)
    ended, all_after, ours_after = used()
    return Result(trial, found, ((all_after - all_before) - (ours_after - ours_before)) / (ended - began))


def results_of(trials: Iterable[dict[str, Any]], most: int) -> Iterator[Result]:
    """Yield the results of trials, of which so many run at once."""
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name, ExitStack() as stack:
        labs = SimpleQueue[Lab]()
        for number in range(most):
            labs.put(lab := Lab(Path(name, str(number))))
            stack.callback(lab.network.stop)
        yield from stack.enter_context(ThreadPoolExecutor(most)).map(lambda trial: run(trial, labs), trials)


def show(kind: str, results: Sequence[Result]) -> None:
    """Print how many trials of a kind were right."""
    right = [each.is_right for each in results]
    loaded = [each for each in results if each.load > LOAD]
    bar = "95 %" if KINDS[kind] else "no rank named in any"
    print(
        f"real trainings, {kind}: {sum(right)} of {len(right)} right, {sum(right) / len(right):.1%} (bar: {bar}); "
        f"{len(loaded)} under load, of these {sum(each.is_right for each in loaded)} right",
        flush=True,
    )


def simulate() -> None:
    """Print how often simulated stragglers are named, and others."""
    began = time.process_time()
    named = list(named_in_quiet(range(QUIET)))
    print(f"quiet runs in which a rank was named: {len(named)} of {QUIET} (bar: 0) {named}")
    right = SLOW - len(list(missed(range(SLOW))))
    print(f"slow ranks that were named for the right reason: {right} of {SLOW}, {right / SLOW:.1%} (bar: 95 %)")
    print(f"{time.process_time() - began:.1f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, default=3, metavar="N")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--no-simulation", action="store_true")
    options = parser.parse_args()
    if not options.no_simulation:
        simulate()
    if options.real and (why := why_no_nodes()):
        sys.exit(f"no real trainings: {why}")
    trials = [trial_of(kind, number) for kind in options.kinds for number in range(options.real)]
    results = list[Result]()
    for alone in (False, True):
        chosen = [trial for trial in trials if trial["computes"] == alone]
        for result in results_of(chosen, 1 if alone else LABS) if chosen else ():
            results.append(result)
            if not result.is_right:
                trial = result.trial
                said = [one.sentence for one in result.found]
                print(
                    f"  {trial['kind']} {trial['number']}, rank {trial['odd']}, load {result.load:.0%}: {said}",
                    flush=True,
                )
    for kind in options.kinds if options.real else ():
        show(kind, [each for each in results if each.trial["kind"] == kind])


if __name__ == "__main__":
    main()
