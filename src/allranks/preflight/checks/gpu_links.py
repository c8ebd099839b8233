"""GPUs: how they reach the machine, and each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from allranks.hostlist import fold
from allranks.preflight.checks.gpus import Gpu, answering, label, on_gpus, together
from allranks.preflight.model import Finding, Node, Seen, passed, skipped, warned
from allranks.preflight.registry import on_each_node, on_the_whole


@on_gpus("gpu-pcie", why="a card that sits badly, or in the wrong slot, gets its data at a fraction of the speed")
def pcie(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at the lanes that a card uses, and at the generation that its slot allows it.

    A card that idles may lower both (man nvidia-smi): fewer lanes are a fault while its generation is the full one, or
    where others idle with more. A slot that is older than its card is so by design if it is so for all of the machine.
    """
    known = [gpu for gpu in gpus if gpu["pcie"]["width"] and gpu["pcie"]["max_width"]]
    if not known:
        return skipped("the driver does not tell how they are connected")
    slow = [
        (label(gpu), text)
        for gpu in known
        for text in _slow(gpu["pcie"], [other["pcie"] for other in gpus if other["name"] == gpu["name"]])
    ]
    if slow:
        return warned(together(slow), fix=f"have the card in {node.host} and its slot looked at: lspci -vv as root")
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


@on_the_whole(
    "nvlink",
    why="data that cannot go by NVLink takes a way that is ten times slower, and all ranks wait",
    facts=("gpus",),
)
def nvlink(seen: Seen) -> Iterator[Finding]:
    """Look at whether links are down that others of the same model have up."""
    if not seen.nodes:
        yield skipped(seen.why_no_nodes)
    gpus = [gpu for node in seen.nodes if "gpus" in node.facts for gpu in answering(node.facts["gpus"])]
    for node in seen.nodes:
        if "gpus" in node.facts:
            yield _of_node(answering(node.facts["gpus"]), gpus, node).on(node.host)
        elif node.failure is None:
            yield skipped(node.errors.get("gpus", "it was not asked for"), host=node.host)


def _of_node(own: list[Gpu], gpus: list[Gpu], node: Node) -> Finding:
    if not any(gpu["nvlinks"] for gpu in own):
        return skipped("these GPUs have no NVLink" if own else node.facts["gpus"]["why"] or "no GPU answers")
    down = [(label(gpu), text) for gpu in own if (text := _down(gpu, gpus))]
    if down:
        fix = f"have {node.host} looked at: nvidia-smi nvlink --status, dmesg"
        return warned(together(down), fix=fix, exclude=node.host)
    return passed(", ".join(sorted({f"{_up(gpu)} links are up" for gpu in own if gpu["nvlinks"]})))


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
    why="GPUs that cannot read each other's memory exchange data through the machine's, which NCCL does more slowly",
    fact="gpus",
)
def peers(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether the GPUs of a node reach each other. Without NVLink the driver lets no GeForce do so."""
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
