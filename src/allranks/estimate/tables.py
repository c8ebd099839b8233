"""What the arithmetic takes as known: types, optimizers, networks and GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

#: Bytes of a number.
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Numbers that an optimizer keeps for each parameter, and the bytes of each; None: as many as a parameter has.
#: torch.optim: exp_avg and exp_avg_sq of Adam, momentum_buffer of SGD, made by zeros_like(parameter). adamw-fp32 is
#: mixed precision with a copy of the parameters and both averages in fp32: 12 bytes, Rajbhandari et al. 2020,
#: arXiv:1910.02054, section 3.1.
OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    "adamw": (2, None),
    "adam": (2, None),
    "adamw-fp32": (3, 4),
    "adamw-8bit": (2, 1),  # Dettmers et al. 2022, arXiv:2110.02861; its scales, an 0.1 %, are not counted.
    "momentum": (1, None),
    "sgd": (0, None),
}
#: Other names of these, in small letters.
SAME = {
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("adamw8bit", "adam8bit", "adam-8bit"), "adamw-8bit"),
    **dict.fromkeys(("sgd-momentum", "nesterov"), "momentum"),
}


#: What averages gradients on the CPUs of one machine, if their sum is not small.
SHARED_MEMORY = "shared memory"


@dataclass(frozen=True)
class Network:
    """A network: bytes a second that one node, or one GPU, sends and receives at the same time.

    Attributes:
        name: as the user writes it, or where it was measured.
        bandwidth: bytes per second, in each direction.
        place: between the GPUs of a node, between nodes, or both.
        curves: for each operation, messages as measured: bytes that a rank sends (for shared memory: of the
            gradients), rising, and seconds. Empty if the bandwidth is the one on paper.
        on_cpus: whether it was measured with tensors on CPUs.
    """

    name: str
    bandwidth: float
    place: Literal["within", "between", "both"]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    on_cpus: bool = False

    def serves(self, nodes: int) -> bool:
        """Whether ranks on so many nodes send over it."""
        return self.place in ("both", "within" if nodes == 1 else "between")

    def seconds(self, operation: str, sent: float) -> float:
        """Return how long an operation takes in which a rank sends so many bytes."""
        curve = self.curves.get(operation) or self.curves.get("all_reduce")
        return interpolated(curve, sent) if curve else sent / self.bandwidth


def interpolated(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Return the seconds of a size, by a power law between its neighbours.

    Below the smallest one it is latency, which is the same for all, and above the largest a rate.
    """
    (least, latency), (most, longest) = curve[0], curve[-1]
    if size <= least:
        return latency
    if size >= most:
        return longest * size / most
    (below, before), (above, after) = next(pair for pair in pairwise(curve) if size <= pair[1][0])
    return before * math.exp(math.log(after / before) * math.log(size / below) / math.log(above / below))


#: Ethernet: IEEE 802.3. InfiniBand, four lanes: IBTA's roadmap. PCIe, 16 lanes: PCI-SIG, base specifications 4.0 and
#: 5.0. NVLink: all links of one GPU in one direction, half of what NVIDIA's data sheets of A100, H100 and B200 add up.
NETWORKS = {
    **{f"{rate}GbE": Network(f"{rate}GbE", rate * 1e9 / 8, "between") for rate in (1, 10, 25, 40, 100, 200, 400)},
    **{
        name: Network(name, rate * 1e9 / 8, "between")
        for name, rate in {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}.items()
    },
    "PCIe4": Network("PCIe4", 31.5e9, "within"),
    "PCIe5": Network("PCIe5", 63e9, "within"),
    "NVLink3": Network("NVLink3", 300e9, "within"),
    "NVLink4": Network("NVLink4", 450e9, "within"),
    "NVLink5": Network("NVLink5", 900e9, "within"),
}

GIB = 1 << 30
#: Memory of common GPUs in GiB, as nvidia-smi shows it within a percent, and which have it.
GPUS = {
    16: "T4, V100",
    24: "RTX 3090, RTX 4090, A10, L4",
    32: "V100, RTX 5090",
    40: "A100",
    48: "A40, L40S, RTX A6000",
    80: "A100, H100",
    141: "H200",
    180: "B200",
}
#: What CUDA's context, cuBLAS and NCCL take of a GPU beside torch's tensors: 0.5 to 1 GB; the larger is assumed.
CONTEXT_BYTES = GIB


def smallest_gpu(size: int) -> int | None:
    """Return the memory, in GiB, of the smallest common GPU that holds so many bytes; None if none does."""
    return next((memory for memory in GPUS if size + CONTEXT_BYTES <= memory * GIB), None)
