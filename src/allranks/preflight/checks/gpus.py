"""GPUs: whether they are there, whether the driver serves the torch that is installed, and whether they are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import floor
from typing import Any

from allranks.hostlist import fold
from allranks.job.units import format_count, format_size
from allranks.preflight.compare import odd_ones
from allranks.preflight.model import Finding, Node, Seen, failed, passed, skipped, warned
from allranks.preflight.registry import on_each_node, on_the_whole

#: Shares of a GPU's memory: what others hold of it is worth a word from the first on; below the second of it free, no
#: model gets in.
_HELD, _LEFT = 0.10, 0.05
#: From this version of CUDA on a driver serves every version with the same first number: NVIDIA, "CUDA Compatibility",
#: Minor Version Compatibility. Before it, none that is newer.
_MINOR_COMPATIBLE = 11

Gpu = dict[str, Any]
GpuCheck = Callable[[list[Gpu], Node, Seen], Finding]


def on_gpus(name: str, *, why: str, is_full: bool = False) -> Callable[[GpuCheck], GpuCheck]:
    """Register a check that looks at those GPUs of each node which answer; a node without them is skipped.

    Args:
        name: what ``--only`` and ``--skip`` call it.
        why: why it matters, in one sentence.
        is_full: whether it is part of ``--full`` alone.
    """

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
    """Return those of the GPUs that ranks take, the first ones: what is wrong with others stops nobody."""
    if seen.plan.backend != "nccl":
        return []
    return gpus if seen.plan.ranks_unknown or seen.plan.ranks else gpus[: seen.plan.nproc_per_node]


def label(gpu: Gpu) -> str:
    """Call a GPU what nvidia-smi calls it."""
    return f"GPU {gpu['index']}" if gpu["part"] is None else f"GPU {gpu['index']} part {gpu['part']}"


def together(found: Iterable[tuple[str, str]]) -> str:
    """Write what was found of GPUs, with those together of which the same was found: ``GPU [0-3]: 2 of 18 links``."""
    texts: dict[str, list[str]] = {}
    for gpu, text in found:
        texts.setdefault(gpu, []).append(text)
    gpus: dict[str, list[str]] = {}
    for gpu, all_of_it in texts.items():
        gpus.setdefault(", ".join(all_of_it), []).append(gpu)
    return "; ".join(f"{fold(alike)}: {text}" for text, alike in gpus.items())


@on_each_node("gpu-count", why="a rank for which there is no GPU ends as soon as it starts", fact="gpus")
def count(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether there are as many GPUs as the job needs on each node."""
    gpus, asked = answering(fact), _asked(seen)
    silent = [(label(gpu), f"does not answer ({gpu['error']})") for gpu in fact["gpus"] if gpu["error"]]
    if silent:
        fix = f"look for Xid in dmesg of {node.host}, reset the GPU or reboot"
        return (_bad(seen) if len(gpus) < asked else warned)(together(silent), fix=fix, exclude=node.host)
    if not gpus and fact["is_amd"]:
        return skipped("AMD's GPUs are not looked at")
    if len(gpus) < asked:
        what = f"{len(gpus)} of {format_count(asked, 'GPU')}: {_why_few(fact)}"
        return _bad(seen)(what, fix=_more(node, len(gpus)), exclude=node.host)
    if not gpus:
        return skipped(f"the job asks for no GPU: {fact['why']}")
    return passed(_models(gpus))


def _asked(seen: Seen) -> int:
    """Return how many GPUs each node needs, as far as that is known: with nccl one for each rank."""
    plan = seen.plan
    ranks = 1 if plan.ranks_unknown or plan.ranks else plan.nproc_per_node
    return max(ranks if plan.backend == "nccl" else 0, seen.job.resources.gpus_per_node or 0)


def _bad(seen: Seen) -> Callable[..., Finding]:
    """Return what makes a finding of GPUs that are missing: over gloo the job can go on without them."""
    return failed if seen.plan.backend == "nccl" else warned


def _why_few(fact: Any) -> str:
    if fact["why"]:
        return str(fact["why"])
    if any(gpu["part"] is not None for gpu in fact["gpus"]):
        return "a process can use one part of a divided GPU (MIG), and no other GPU beside it"
    there = format_count(fact["installed"], "GPU") + " in this machine"
    return there if fact["visible"] is None else f"CUDA_VISIBLE_DEVICES is {fact['visible']!r}, with {there}"


def _more(node: Node, usable: int) -> str:
    fewer = f"--gpus-per-node {usable}" if usable else "--backend gloo to run on the CPU"
    return f"see what nvidia-smi -L tells on {node.host}; or {fewer}"


def _models(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(gpu["name"] for gpu in gpus).items())


@on_each_node(
    "gpu-driver",
    why="a driver serves the CUDA that it came with, and those of the same first number (from 11 on) or lower ones",
    fact="gpus",
    also=("torch",),
)
def driver(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether the driver serves the CUDA that torch was built with."""
    torch = node.facts.get("torch")
    if not answering(fact) or not torch or not fact["cuda"]:
        nothing = "the driver does not tell its CUDA" if torch else node.errors.get("torch", "there is no torch")
        return skipped(nothing if answering(fact) else fact["why"] or "no GPU answers")
    has = f"driver {fact['driver']} (CUDA {fact['cuda']}), torch {torch['version']}"
    if not torch["cuda"]:
        sure = seen.plan.backend == "nccl" and (seen.job.launch.backend or seen.job.resources.gpus_per_node)
        return (failed if sure else warned)(
            f"{has} built without CUDA", fix="install a torch with CUDA, or --backend gloo to run on the CPU"
        )
    if _serves(_version(fact["cuda"]), _version(torch["cuda"])):
        return passed(f"{has} for CUDA {torch['cuda']}")
    what = f"{has} for CUDA {torch['cuda']}, which the driver is too old for"
    fix = f"on {node.host} a newer driver, or a torch for CUDA {fact['cuda'].split('.')[0]}, as pytorch.org says"
    return failed(what, fix=fix)


def _serves(driver: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    return driver >= needed or (driver[0] == needed[0] and needed[0] >= _MINOR_COMPATIBLE)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@on_gpus("gpu-memory", why="memory that another process holds is missing for the model, which ends as out of memory")
def memory(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at how much memory is free, and who holds the rest."""
    known = [(gpu, gpu["memory"]["free"] / gpu["memory"]["total"]) for gpu in gpus if gpu["memory"]]
    if not known:
        return skipped("the driver does not tell how much memory is free")
    held = [gpu for gpu, share in known if share < 1 - _HELD]
    if not held:
        return passed(f"{floor(100 * min(share for _, share in known))}% or more of it is free on each GPU")
    full = [gpu for gpu, share in known if share < _LEFT]
    make = failed if any(gpu in full for gpu in taken(gpus, seen)) else warned
    return make(together((label(gpu), _holders(gpu)) for gpu in held), fix=_end(held, node), exclude=node.host)


def _holders(gpu: Gpu) -> str:
    free = f"{format_size(gpu['memory']['free'])} of {format_size(gpu['memory']['total'])} free"
    return f"{free}, held by {', '.join(map(_process, gpu['processes'])) or 'a process that cannot be seen from here'}"


def _process(process: dict[str, Any]) -> str:
    amount = f": {format_size(process['used'])}" if process["used"] else ""
    return f"{process['name'] or 'process'} {process['pid']} of {process['user'] or 'somebody'}{amount}"


def _end(held: Iterable[Gpu], node: Node) -> str:
    ours = sorted({process["pid"] for gpu in held for process in gpu["processes"] if process["is_ours"]})
    return f"on {node.host}: kill {' '.join(map(str, ours))}" if ours else "wait for the end of these processes"


@on_the_whole(
    "gpu-same", why="all ranks wait for the slowest one, so that one slower GPU slows all of them", facts=("gpus",)
)
def same(seen: Seen) -> Iterator[Finding]:
    """Look at whether all nodes have the same GPUs."""
    has = {node.host: _models(answering(node.facts["gpus"])) for node in seen.nodes if "gpus" in node.facts}
    if len(has) < 2 or not any(has.values()):
        yield skipped("no two nodes with GPUs were looked at" if seen.nodes else seen.why_no_nodes)
        return
    usual, odd = odd_ones(has)
    if not odd:
        yield passed(f"{usual} on each node")
    for host, models in odd.items():
        what = f"{models or 'no GPU'}, where {format_count(len(has) - len(odd), 'node')} have {usual or 'none'}"
        yield warned(what, fix="take nodes of one kind", host=host, exclude=host)
