"""GPUs: faults, heat, what slows them down, their links, and whether they compute right and as fast as each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from allranks.checks.model import Finding, Grade, Node, Seen, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.checks.topics.gpus import Gpu, answering, label, on_gpus, taken, together
from allranks.system.hostlist import fold

#: Degrees Celsius below the temperature from which on a GPU slows itself down.
_CLOSE = 5
#: What the driver wants before a GPU is used again. Of NVIDIA's words for these (GPU Memory Error Management, recovery
#: action flag) only the first two mean that it cannot be used.
_UNUSABLE = ("reset", "reboot")
_EXCHANGE = "inspect the GPU: nvidia-smi -q -d ECC,ROW_REMAPPER on {0}"
_RESET = "when nothing runs on it, on {0} as root: nvidia-smi --gpu-reset -i {1}"
#: A GPU that reaches less than this of what others of its model do is slow.
_SLOW = 0.7
_PRECISIONS = ("fp32", "bf16")

Measured = Mapping[str, Any]


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


@on_gpus("gpu-temperature", why="an overheated GPU throttles itself, and slows all ranks")
def temperature(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check how far GPUs are from slowing themselves down."""
    known = [gpu for gpu in gpus if gpu["temperature"] is not None]
    if not known:
        return skipped("these GPUs do not report their temperature")
    warm = []
    for gpu in known:
        if gpu["margin"] is not None and gpu["margin"] <= _CLOSE:
            limit = gpu["temperature"] + gpu["margin"]
            warm.append((label(gpu), f"{gpu['temperature']} °C, and from {limit} °C on it slows down"))
    if warm:
        return warned(together(warm), fix=f"check the cooling of {node.host}, or what runs there: nvidia-smi")
    return passed(f"below {(max(gpu['temperature'] for gpu in known) // 10 + 1) * 10} °C")


@on_gpus(
    "gpu-persistence",
    why="without it the driver initialises the GPU at each start, which takes seconds; training speed is the same",
    is_full=True,
)
def persistence(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Check that the driver keeps idle GPUs ready."""
    if all(gpu["persistence"] is None for gpu in gpus):
        return skipped("the driver does not report")
    off = [(label(gpu), "persistence mode is off") for gpu in gpus if gpu["persistence"] == 0]
    if off:
        return warned(together(off), fix=f"on {node.host} as root: nvidia-smi -pm 1, or start nvidia-persistenced")
    return passed("on")


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
    "gpu-peers",
    why="GPUs without peer access exchange data through host memory, which is slower",
    fact="gpus",
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
    """Judge, for each host, what :func:`allranks.selftest.gpu_compute.measure` has returned on each of its GPUs."""
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
