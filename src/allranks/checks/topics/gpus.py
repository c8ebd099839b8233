"""GPUs: whether they are there, free and healthy, serve the torch that is installed, and compute right and fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import floor
from statistics import median
from typing import Any

from allranks.checks.model import Finding, Grade, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.job.units import format_count, format_size
from allranks.system.hostlist import fold

#: Shares of a GPU's memory: what others hold is reported from the first on; with less than the second
#: free no model fits.
_HELD, _LEFT = 0.10, 0.05
#: From this version of CUDA on a driver serves every version with the same first number: NVIDIA, "CUDA Compatibility",
#: Minor Version Compatibility. Before it, none that is newer.
_MINOR_COMPATIBLE = 11
#: What the driver wants before a GPU is used again. Of NVIDIA's words for these (GPU Memory Error Management, recovery
#: action flag) only the first two mean that it cannot be used.
_UNUSABLE = ("reset", "reboot")
_EXCHANGE = "inspect the GPU: nvidia-smi -q -d ECC,ROW_REMAPPER on {0}"
_RESET = "when nothing runs on it, on {0} as root: nvidia-smi --gpu-reset -i {1}"
#: A GPU that reaches less than this of what others of its model do is slow.
_SLOW = 0.7
_PRECISIONS = ("fp32", "bf16")

Gpu = dict[str, Any]
GpuCheck = Callable[[list[Gpu], Node, Seen], Finding]
Measured = Mapping[str, Any]


def on_gpus(name: str, *, why: str) -> Callable[[GpuCheck], GpuCheck]:
    """Register a check of those GPUs of each node which answer; a node without them is skipped."""

    def register(function: GpuCheck) -> GpuCheck:
        @on_each_node(name, why=why, fact="gpus")
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
        holders.append(f"{each['name'] or 'process'} {each['pid']} of {each['user'] or 'another user'}{amount}")
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


@on_gpus("gpu-ecc", why="a GPU with failing memory fails the job, often hours after the start")
def ecc(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check for errors of memory that could not be corrected, and for memory that could not be replaced."""
    fatal = taken(gpus, seen)
    found = [(grade if gpu in fatal else Grade.WARN, text, gpu) for gpu in gpus for grade, text in _faults(gpu)]
    if found:
        grade = Grade.FAIL if any(each is Grade.FAIL for each, _, _ in found) else Grade.WARN
        worst = [gpu for each, _, gpu in found if each is grade]
        fix = (_EXCHANGE if any(_has_failed(gpu) for gpu in worst) else _RESET).format(node.host, worst[0]["index"])
        return Finding(grade, together((label(gpu), text) for _, text, gpu in found), fix, exclude=node.host)
    if all(gpu["ecc"]["uncorrected"] is None and gpu["remapped"] is None for gpu in gpus):
        return skipped("these GPUs do not check their memory")
    return passed("every error was corrected since the driver was loaded")


def _faults(gpu: Gpu) -> Iterator[tuple[Grade, str]]:
    # NVIDIA, GPU Memory Error Management: with a remapping that is pending new work can be launched, without loss;
    # after one that failed the GPU is to be tested and exchanged.
    if gpu["recovery"]:
        yield Grade.FAIL if gpu["recovery"] in _UNUSABLE else Grade.WARN, f"the driver asks for a {gpu['recovery']}"
    if _has_failed(gpu):
        yield Grade.FAIL, "bad rows of its memory could not be replaced"
    elif gpu["remapped"] and gpu["remapped"]["pending"]:
        yield Grade.WARN, "bad rows of its memory are replaced at its next reset"
    if errors := gpu["ecc"]["uncorrected"]:
        yield Grade.WARN, f"{errors} errors of its memory were not corrected since the driver was loaded"


def _has_failed(gpu: Gpu) -> bool:
    return bool(gpu["remapped"] and gpu["remapped"]["failure"])


@on_gpus("gpu-throttle", why="a GPU throttled by heat or lack of power slows all ranks")
def throttle(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check that no GPU is slowed down now, unless that was chosen."""
    if all(gpu["throttled"] is None for gpu in gpus):
        return skipped("the driver does not report what slows them down")
    slowed = [(label(gpu), f"slowed down: {', '.join(gpu['throttled'])}") for gpu in gpus if gpu["throttled"]]
    if slowed:
        fix = f"check cooling and power of {node.host}: nvidia-smi -q -d PERFORMANCE"
        return warned(together(slowed), fix=fix, exclude=node.host)
    return passed("none is slowed down")


@on_gpus("gpu-pcie", why="a badly seated card, or one in the wrong slot, gets a fraction of the bandwidth")
def pcie(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check the lanes that a card uses, and the generation that its slot allows it.

    A card that idles may lower both (man nvidia-smi): fewer lanes are a fault while its generation is the full one, or
    where others idle with more. A slot that is older than its card is so by design if it is so for all of the machine.
    """
    known = [gpu for gpu in gpus if gpu["pcie"]["width"] and gpu["pcie"]["max_width"]]
    if not known:
        return skipped("the driver does not report how they are connected")
    slow = [
        (label(gpu), text)
        for gpu in known
        for text in _slow(gpu["pcie"], [other["pcie"] for other in gpus if other["name"] == gpu["name"]])
    ]
    if slow:
        return warned(together(slow), fix=f"inspect the card in {node.host} and its slot: lspci -vv as root")
    widths = sorted({f"x{gpu['pcie']['width']}" for gpu in known})
    return passed(f"{', '.join(widths)}, as wide as card and slot can")


def _slow(link: dict[str, Any], links: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield what is slow about a link, beside those of all cards of its model here."""
    width, generation = (max(other[name] or 0 for other in links) for name in ("width", "max_generation"))
    is_idle = link["generation"] != link["max_generation"] and link["width"] == width
    if link["width"] < link["max_width"] and not is_idle:
        yield f"x{link['width']} of x{link['max_width']} lanes"
    if link["max_generation"] and link["max_generation"] < generation:
        yield f"generation {link['max_generation']} of PCIe, where others have {generation}"


@on_gpus("nvlink", why="without NVLink data takes a path that is ten times slower, and all ranks wait")
def nvlink(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check that no link is down that others of the same model have up."""
    if not any(gpu["nvlinks"] for gpu in gpus):
        return skipped("these GPUs have no NVLink")
    everywhere = [gpu for other in seen.nodes if "gpus" in other.facts for gpu in answering(other.facts["gpus"])]
    down = [(label(gpu), text) for gpu in gpus if (text := _down(gpu, everywhere))]
    if down:
        fix = f"inspect {node.host}: nvidia-smi nvlink --status, dmesg"
        return warned(together(down), fix=fix, exclude=node.host)
    return passed(", ".join(sorted({f"{_up(gpu)} links are up" for gpu in gpus if gpu["nvlinks"]})))


def _up(gpu: Gpu) -> int:
    return sum(link != "inactive" for link in gpu["nvlinks"])


def _down(gpu: Gpu, gpus: Iterable[Gpu]) -> str:
    """Name the links that are down and up elsewhere.

    A GPU without any link is at fault only where others are linked to a switch: two out of four may have a bridge.
    """
    peers = [other["nvlinks"] for other in gpus if other["name"] == gpu["name"]]
    elsewhere = {number for links in peers for number, link in enumerate(links) if link != "inactive"}
    down = [number for number, link in enumerate(gpu["nvlinks"]) if link == "inactive" and number in elsewhere]
    if not down or not (_up(gpu) or any("switch" in links for links in peers)):
        return ""
    return f"NVLink {fold(map(str, down))} down, and up on others of its model"


@on_each_node(
    "gpu-peers", why="GPUs without peer access exchange data through host memory, which is slower", fact="gpus"
)
def peers(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the GPUs of a node reach each other. Without NVLink the driver lets no GeForce do so."""
    gpus = [gpu for gpu in answering(fact) if gpu["part"] is None]
    if len(gpus) < 2:
        return skipped(fact["why"] or "there are no two whole GPUs")
    apart = [(f"GPU {one}-{other}", reason) for one, other, reason in fact["no_peers"]]
    pairs = len(gpus) * (len(gpus) - 1) // 2
    if not apart:
        return passed("each reaches each other one")
    is_by_design = all("GeForce" in gpu["name"] for gpu in gpus) or all(why == "model of GPU" for _, why in apart)
    if len(apart) == pairs and is_by_design:
        return passed("GPUs of this model do not reach each other: NCCL goes through the machine's memory")
    what = f"{len(apart)} of {pairs} pairs cannot reach each other: {together(apart)}"
    return warned(what, fix=f"on {node.host}: nvidia-smi topo -p2p r; turn off ACS and IOMMU in its BIOS")


@on_the_whole(
    "gpu-compute",
    why="a GPU that computes wrong results corrupts the model silently, and a slow one slows all ranks",
    facts=("host",),
    is_full=True,
    needs_trial=True,
)
def compute(seen: Seen) -> Iterator[Finding]:
    """Check what ranks have computed on the GPUs of the nodes."""
    measured = {node.host: node.facts["gpu-compute"] for node in seen.nodes if "gpu-compute" in node.facts}
    if measured:
        yield from judge_computed(measured)
    else:
        yield skipped(seen.why_no_trial or "no rank has computed on a GPU")


def judge_computed(per_node: Mapping[str, Sequence[Measured]]) -> Iterator[Finding]:
    """Judge, for each host, what ``measure_products`` of ``allranks.selftest`` has returned on each of its GPUs."""
    everything = [each for measured in per_node.values() for each in measured]
    for host, measured in per_node.items():
        bad = [(f"GPU {each['index']}", *fault) for each in measured for fault in _wrong_results(each, everything)]
        if not bad:
            yield passed(_reached(measured, everything), host=host)
            continue
        grade = Grade.FAIL if any(each is Grade.FAIL for _, each, _ in bad) else Grade.WARN
        what = together((gpu, text) for gpu, _, text in bad)
        yield Finding(grade, what, f"inspect {host}: dcgmi diag -r 3", host, exclude=host)


def _wrong_results(each: Measured, everything: Iterable[Measured]) -> Iterator[tuple[Grade, str]]:
    tried = [name for name in _PRECISIONS if name in each]
    if not tried:
        built = ", ".join(each["arches"])
        yield Grade.FAIL, f"is of compute capability {each['capability']}, and torch is built for {built or 'none'}"
    for name in tried:
        found = each[name]
        others = [other[name]["tflops"] for other in _alike(each, everything, name) if other is not each]
        if "error" in found:
            yield Grade.FAIL, f"cannot compute in {name}: {found['error']}"
        elif found["wrong"]:
            yield Grade.FAIL, f"computes wrongly: {found['wrong']} of {found['values']} values of a product in {name}"
        elif others and found["tflops"] < _SLOW * median(others):
            yield Grade.WARN, f"reaches {found['tflops']:.3g} TFLOP/s in {name}, others {median(others):.3g}"


def _alike(each: Measured, everything: Iterable[Measured], precision: str) -> list[Measured]:
    """Return those of the same model that have computed in a precision."""
    alike = (other for other in everything if other["name"] == each["name"])
    return [other for other in alike if "tflops" in other.get(precision, ())]


def _reached(measured: Sequence[Measured], everything: Sequence[Measured]) -> str:
    """Write what GPUs of these models reach on all nodes, which is the same for each node that has them."""
    models = []
    for name in dict.fromkeys(each["name"] for each in measured):
        rates = []
        for precision in _PRECISIONS:
            if flops := [each[precision]["tflops"] for each in _alike({"name": name}, everything, precision)]:
                least, most = f"{min(flops):.3g}", f"{max(flops):.3g}"
                rates.append(f"{least if least == most else f'{least} to {most}'} in {precision}")
        models.append(f"{name}: {', '.join(rates)} TFLOP/s, and right")
    return "; ".join(models)
