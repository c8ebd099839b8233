"""GPUs: whether they are there and free, and whether the driver serves the torch that is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import floor
from typing import Any

from allranks.checks.model import Finding, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.job.units import format_count, format_size
from allranks.system.hostlist import fold

#: Shares of a GPU's memory: what others hold of it is worth a word from the first on; below the second of it free, no
#: model gets in.
_HELD, _LEFT = 0.10, 0.05
#: From this version of CUDA on a driver serves every version with the same first number: NVIDIA, "CUDA Compatibility",
#: Minor Version Compatibility. Before it, none that is newer.
_MINOR_COMPATIBLE = 11

Gpu = dict[str, Any]
GpuCheck = Callable[[list[Gpu], Node, Seen], Finding]


def on_gpus(name: str, *, why: str, is_full: bool = False) -> Callable[[GpuCheck], GpuCheck]:
    """Register a check of those GPUs of each node which answer; a node without them is skipped."""

    def register(function: GpuCheck) -> GpuCheck:
        @on_each_node(name, why=why, fact="gpus", is_full=is_full)
        def find(fact: Any, node: Node, seen: Seen) -> Finding:
            gpus = answering(fact)
            return function(gpus, node, seen) if gpus else skipped(fact["why"] or "no GPU answers")

        return function

    return register


def answering(fact: Any) -> list[Gpu]:
    """Return the GPUs of a node that answer."""
    return [gpu for gpu in fact["gpus"] if not gpu["error"]]


def taken(gpus: list[Gpu], seen: Seen) -> list[Gpu]:
    """Return those of the GPUs that ranks take, the first ones: a fault of others stops no rank."""
    if seen.plan.backend != "nccl":
        return []
    return gpus if seen.plan.ranks_unknown or seen.plan.ranks else gpus[: seen.plan.nproc_per_node]


def label(gpu: Gpu) -> str:
    """Name a GPU as nvidia-smi does."""
    return f"GPU {gpu['index']}" if gpu["part"] is None else f"GPU {gpu['index']} part {gpu['part']}"


def together(found: Iterable[tuple[str, str]]) -> str:
    """Write findings about GPUs, grouped by their text: ``GPU [0-3]: 2 of 18 links``."""
    texts: dict[str, list[str]] = {}
    for gpu, text in found:
        texts.setdefault(gpu, []).append(text)
    gpus: dict[str, list[str]] = {}
    for gpu, all_of_it in texts.items():
        gpus.setdefault(", ".join(all_of_it), []).append(gpu)
    return "; ".join(f"{fold(alike)}: {text}" for text, alike in gpus.items())


@on_each_node("gpu-count", why="a rank without a GPU fails as soon as it starts", fact="gpus")
def count(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that there are as many GPUs as the job needs on each node."""
    plan, gpus = seen.plan, answering(fact)
    ranks = 1 if plan.ranks_unknown or plan.ranks else plan.nproc_per_node
    requested = max(ranks if plan.backend == "nccl" else 0, seen.job.resources.gpus_per_node or 0)
    make = failed if plan.backend == "nccl" else warned  # Over gloo the job can continue without them.
    silent = [(label(gpu), f"does not answer ({gpu['error']})") for gpu in fact["gpus"] if gpu["error"]]
    if silent:
        fix = f"look for Xid in dmesg of {node.host}, reset the GPU or reboot"
        return (make if len(gpus) < requested else warned)(together(silent), fix=fix, exclude=node.host)
    if not gpus and fact["is_amd"]:
        return skipped("AMD GPUs are not checked")
    if len(gpus) < requested:
        what = f"{len(gpus)} of {format_count(requested, 'GPU')}: {_why_few(fact)}"
        fewer = f"--gpus-per-node {len(gpus)}" if gpus else "--backend gloo to run on the CPU"
        fix = f"run nvidia-smi -L on {node.host}; or {fewer}"
        return make(what, fix=fix, exclude=node.host)
    if not gpus:
        return skipped(f"the job asks for no GPU: {fact['why']}")
    return passed(_models(gpus))


def _why_few(fact: Any) -> str:
    if fact["why"]:
        return str(fact["why"])
    if any(gpu["part"] is not None for gpu in fact["gpus"]):
        return "a process can use one part of a divided GPU (MIG), and no other GPU beside it"
    there = format_count(fact["installed"], "GPU") + " in this machine"
    return there if fact["visible"] is None else f"CUDA_VISIBLE_DEVICES is {fact['visible']!r}, with {there}"


def _models(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(gpu["name"] for gpu in gpus).items())


@on_each_node(
    "gpu-driver",
    why="a driver supports its own CUDA version, earlier ones, and from 11 on those of the same major version",
    fact="gpus",
    also=("torch",),
)
def driver(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the driver serves the CUDA that torch was built with."""
    torch = node.facts.get("torch")
    if not answering(fact) or not torch or not fact["cuda"]:
        nothing = "the driver does not report its CUDA" if torch else node.errors.get("torch", "there is no torch")
        return skipped(nothing if answering(fact) else fact["why"] or "no GPU answers")
    has = f"driver {fact['driver']} (CUDA {fact['cuda']}), torch {torch['version']}"
    if not torch["cuda"]:
        sure = seen.plan.backend == "nccl" and (seen.job.launch.backend or seen.job.resources.gpus_per_node)
        return (failed if sure else warned)(
            f"{has} built without CUDA", fix="install a torch with CUDA, or --backend gloo to run on the CPU"
        )
    serves, needed = (tuple(map(int, cuda.split(".")[:2])) for cuda in (fact["cuda"], torch["cuda"]))
    if serves >= needed or (serves[0] == needed[0] and needed[0] >= _MINOR_COMPATIBLE):
        return passed(f"{has} for CUDA {torch['cuda']}")
    what = f"{has} for CUDA {torch['cuda']}, which the driver is too old for"
    fix = f"on {node.host} a newer driver, or a torch for CUDA {fact['cuda'].split('.')[0]}, as pytorch.org says"
    return failed(what, fix=fix)


@on_gpus("gpu-memory", why="memory used by another process is missing for the model, which runs out of memory")
def memory(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check how much memory is free, and which processes hold the rest."""
    known = [(gpu, gpu["memory"]["free"] / gpu["memory"]["total"]) for gpu in gpus if gpu["memory"]]
    if not known:
        return skipped("the driver does not report how much memory is free")
    held = [gpu for gpu, share in known if share < 1 - _HELD]
    if not held:
        return passed(f"{floor(100 * min(share for _, share in known))}% or more of it is free on each GPU")
    full = [gpu for gpu, share in known if share < _LEFT]
    make = failed if any(gpu in full for gpu in taken(gpus, seen)) else warned
    ours = sorted({process["pid"] for gpu in held for process in gpu["processes"] if process["is_ours"]})
    fix = f"on {node.host}: kill {' '.join(map(str, ours))}" if ours else "wait for the end of these processes"
    return make(together((label(gpu), _held(gpu)) for gpu in held), fix=fix, exclude=node.host)


def _held(gpu: Gpu) -> str:
    free = f"{format_size(gpu['memory']['free'])} of {format_size(gpu['memory']['total'])} free"
    holders = []
    for each in gpu["processes"]:
        amount = f": {format_size(each['used'])}" if each["used"] else ""
        holders.append(f"{each['name'] or 'process'} {each['pid']} of {each['user'] or 'somebody'}{amount}")
    return f"{free}, held by {', '.join(holders) or 'a process that cannot be seen from here'}"


@on_the_whole("gpu-same", why="all ranks wait for the slowest GPU", facts=("gpus",))
def same(seen: Seen) -> Iterator[Finding]:
    """Check that all nodes have the same GPUs."""
    has = {node.host: _models(answering(node.facts["gpus"])) for node in seen.nodes if "gpus" in node.facts}
    if len(has) < 2 or not any(has.values()):
        yield skipped("fewer than two nodes with GPUs were checked" if seen.nodes else seen.why_no_nodes)
        return
    usual, odd = odd_ones(has)
    if not odd:
        yield passed(f"{usual} on each node")
    for host, models in odd.items():
        what = f"{models or 'no GPU'}, where {format_count(len(has) - len(odd), 'node')} have {usual or 'none'}"
        yield warned(what, fix="take nodes of one kind", host=host, exclude=host)
