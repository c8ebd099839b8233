"""Environment variables: names that nothing reads, debug settings, threads, and what the site needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from allranks.checks.known_variables import FAMILIES, KNOWN, OBSOLETE, OLDEST
from allranks.checks.model import Finding, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.job.problems import closest, listed
from allranks.job.units import format_count

#: Names that are less alike are different words: those of a plugin, or of a release that is newer than our list.
_TYPING_ERROR = 0.9
#: With fewer CPUs for each rank than this, a single thread is what there is room for.
_MANY_CPUS = 8
_ON = ("1", "Y", "ON", "YES", "TRUE")
#: Settings that may differ, since the devices of nodes do.
_OF_A_NODE = {"NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE"}
#: Debug values, in capitals, and what they cost.
_DEBUG = {
    "NCCL_DEBUG": (("INFO", "TRACE"), "each rank writes many lines at its start, among which others are not seen"),
    "TORCH_CPP_LOG_LEVEL": (("INFO",), "each rank writes lines at its start"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "each collective is compared on all ranks first"),
    "TORCH_SHOW_CPP_STACKTRACES": (_ON, "each error takes seconds to be reported"),
    "CUDA_LAUNCH_BLOCKING": (_ON, "the CPU waits for each kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "each tensor is allocated by the driver"),
}
#: Values of NCCL_DEBUG_SUBSYS with which NCCL logs each operation; its default is INIT, BOOTSTRAP and ENV.
_EACH_OPERATION = {"ALL", "COLL", "CALL", "TUNING"}


@on_each_node(
    "variables", why="a misspelled variable has no effect, and no library reports it", fact="variables", also=("torch",)
)
def variables(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check for names of NCCL, torch and gloo that are misspelt or obsolete."""
    names = [name for name in fact["values"] if name.startswith(FAMILIES)]
    remarks = [*_obsolete(names, node.facts.get("torch") or {}), *_misspelt(names)]
    return _finding(remarks, f"{format_count(len(names), 'variable')} of NCCL, torch and gloo")


def _obsolete(names: Iterable[str], torch: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    texts = {"NCCL": torch.get("nccl"), "torch": torch.get("version")}
    for entry in OBSOLETE:
        text = texts[entry.of]
        version = tuple(map(int, re.findall(r"\d+", text.partition("+")[0]))) if text else OLDEST[entry.of]
        if entry.name not in names or version < entry.since:
            continue
        read = "deprecated since" if entry.is_read else "not read any more since"
        said = entry.text or f"{entry.name} is {read} {entry.of} {'.'.join(map(str, entry.since))}"
        yield said, f"{entry.instead} instead of {entry.name}" if entry.instead else f"unset {entry.name}"


def _misspelt(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    obsolete = {entry.name for entry in OBSOLETE}
    for name in names:
        near = closest(name, KNOWN) if name not in obsolete and name not in KNOWN else None
        if near and SequenceMatcher(None, name, near).ratio() >= _TYPING_ERROR:
            yield f"{name} is not known", f"did you mean {near}?"


def _finding(remarks: list[tuple[str, str]], good: str) -> Finding:
    """Put remarks about a node, each with its fix, into one finding."""
    if not remarks:
        return passed(good)
    whats, fixes = zip(*remarks, strict=True)
    return warned("; ".join(whats), fix="; ".join(dict.fromkeys(fixes)))


@on_each_node("debug", why="debug settings make a run slow, and its logs large", fact="variables", also=("infiniband",))
def debug(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check for debug settings that were left on."""
    if seen.job.debug:
        return passed("the job has debug on")
    values = fact["values"]
    remarks = [*_left_on(values)]
    # InfiniBand alone: whether RoCE can be used is not seen from a port that is active.
    ports = [port for port in node.facts.get("infiniband") or () if port["layer"] == "InfiniBand"]
    active = [f"{port['device']}/{port['port']}" for port in ports if port["state"] == "ACTIVE"]
    if active and values.get("NCCL_IB_DISABLE") == "1":
        what = f"NCCL_IB_DISABLE=1, and InfiniBand is active: {listed(active, 'and')}"
        remarks.append((what, "unset NCCL_IB_DISABLE"))
    return _finding(remarks, "nothing is left on")


def _left_on(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, (levels, cost) in _DEBUG.items():
        if values.get(name, "").upper() not in levels:
            continue
        requested = values.get("NCCL_DEBUG_SUBSYS", "").upper()  # With ^ NCCL logs all but what is named.
        if name == "NCCL_DEBUG" and (requested.startswith("^") or not _EACH_OPERATION.isdisjoint(requested.split(","))):
            cost = f"with NCCL_DEBUG_SUBSYS={values['NCCL_DEBUG_SUBSYS']} it writes a line for each operation"
        yield f"{name}={values[name]}: {cost}", f"unset {name}, and --debug for a run that needs it"


@on_each_node(
    "threads",
    why="more threads than CPUs compete for them, and a single one leaves CPUs idle",
    fact="variables",
    also=("cpus",),
)
def threads(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the threads of all ranks fit the CPUs that they may use."""
    given = fact["values"].get("OMP_NUM_THREADS")
    if given is None:
        return passed("OMP_NUM_THREADS is not set: it will be the CPUs of each rank")
    if "cpus" not in node.facts:
        return skipped(node.errors.get("cpus", "it is not known how many CPUs there are"))
    cpus, ranks = node.facts["cpus"]["allowed"], seen.plan.nproc_per_node
    share = max(1, cpus // ranks)
    what = f"OMP_NUM_THREADS={given}, with {format_count(cpus, 'CPU')} for {format_count(ranks, 'rank')}"
    # A list has a number for each level of threads within threads.
    first = given.partition(",")[0].strip()
    if not first.isdecimal() or not int(first):
        return warned(
            f"invalid number of threads: OMP_NUM_THREADS={given}", fix=f"unset it, or OMP_NUM_THREADS={share}"
        )
    if int(first) > share or (int(first) == 1 and share >= _MANY_CPUS):
        return warned(what, fix=f"unset OMP_NUM_THREADS: it will be {share}")
    return passed(what)


@on_each_node("site-variables", why="jobs at this site need the variables in checks.variables", fact="variables")
def site_variables(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the variables that this site needs are set."""
    needed = seen.job.checks.variables
    # Of secrets a node reports the names alone.
    missing = [name for name in needed if name not in (*fact["set"], *seen.job.environment.variables)]
    if missing and not seen.is_prepared:
        return skipped(f"not set before environment.node_setup, which runs with the job: {listed(missing, 'and')}")
    if missing:
        fix = f"set {'it' if len(missing) == 1 else 'them'} in environment.variables, .modules or .node_setup"
        return failed(f"not set: {listed(missing, 'and')}", fix=fix)
    return passed(f"set: {listed(needed, 'and')}") if needed else skipped("checks.variables names none")


@on_the_whole(
    "same-variables", why="ranks with different NCCL settings may wait for each other forever", facts=("variables",)
)
def same_variables(seen: Seen) -> Iterator[Finding]:
    """Compare the settings of NCCL on all nodes."""
    values = {node.host: node.facts["variables"]["values"] for node in seen.nodes if "variables" in node.facts}
    if len(values) < 2:
        yield skipped("there are not two nodes to compare")
        return
    names = sorted({name for each in values.values() for name in each if name.startswith("NCCL_")} - _OF_A_NODE)
    differing = 0
    for name in names:
        common, odd = odd_ones({host: each.get(name) for host, each in values.items()})
        for host, value in odd.items():
            here, there = ("not set" if each is None else each or "empty" for each in (value, common))
            what = f"{name} is {here}, and {there} on the others"
            yield warned(what, fix=f"{name} in environment.variables is the same on all nodes", host=host)
        differing += bool(odd)
    if not differing:
        yield passed(f"{format_count(len(names), 'setting')} of NCCL, the same on {format_count(len(values), 'node')}")
