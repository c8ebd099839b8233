"""The arithmetic of an estimate: memory of a rank, what it sends in a step, how long a step takes, what it costs.

Its tables are what is taken as known: types, optimizers and GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from allranks.record.estimate import SHARED_MEMORY, MeasuredStep

if TYPE_CHECKING:
    from allranks.estimate.network import Network

Strategy = Literal["ddp", "fsdp"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp")
#: Steps of the first row whose samples the cost is of.
_STEPS = 1000
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


@dataclass(frozen=True)
class Needs:
    """What a training holds, in bytes, on a rank that holds all of the model.

    :class:`MeasuredStep` describes the attributes that it has as well.

    Attributes:
        gathered: all parameters in the type in which FSDP gathers them.
        units: the parts of them that it gathers one at a time.
        root: the part that it gathers with the root module, once in a micro-batch.
        checkpoint: of a checkpoint.
    """

    count: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int | None
    sent: int
    gathered: int
    units: tuple[int, ...]
    root: int
    checkpoint: int
    messages: tuple[int, ...]
    messages_of_cpus: tuple[int, ...]
    shared: int = 0
    buffers: int = 0
    temporaries: int = 0
    batch: int | None = None
    global_batch: int | None = None
    accumulation: int = 1

    def memory(self, strategy: Strategy, ranks: int) -> int | None:
        """Return the peak memory of each of so many ranks without CUDA's context; None if activations are unknown.

        DDP holds all of the model, and its gradients in buckets from step to step. FSDP holds a rank's part and,
        gathered, the root's own parameters and those and the gradients of the largest unit: Zhao et al. 2023,
        arXiv:2304.11277, section 3.2.1; torch.distributed.fsdp.fully_shard, ``reshard_after_forward``. It shards
        optimizer state as ZeRO stage 3 does: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
        """
        activations = self._activations(ranks)
        if activations is None:
            return None
        model = self.parameters + self.gradients + self.optimizer_state
        if strategy == "ddp" or ranks == 1:
            return model + self.buffers + max(activations, self.temporaries)
        unit = max(self.units, default=0)
        gradients = max(unit, self.root) * self.gradients / max(1, self.parameters)
        gathered = self.root + unit + gradients
        return round(model / ranks + gathered + self.buffers + max(activations, self.temporaries / ranks))

    def _activations(self, ranks: int) -> int | None:
        """Return the activations of a rank; they are taken to grow with its samples."""
        batch = self.rank_batch(ranks)
        if self.activations is None or batch is None or not self.batch:
            return self.activations
        return round(self.activations * batch / self.batch)

    def rank_batch(self, ranks: int) -> int | None:
        """Return the samples of each of so many ranks in a micro-batch, rounded up; None if unknown."""
        return self.batch if self.global_batch is None else math.ceil(self.global_batch / ranks)

    def effective_batch(self, ranks: int) -> int | None:
        """Return the samples of all ranks in a step; None if unknown."""
        total = self.global_batch or (self.batch and self.batch * ranks)
        return total and total * self.accumulation

    def sends(self, strategy: Strategy, ranks: int) -> int:
        """Return the bytes that each rank sends in a step.

        DDP: a ring all-reduce, ``2 (n - 1) / n`` times the gradients (Patarasuk and Yuan 2009, doi
        10.1016/j.jpdc.2008.09.002, section 3). FSDP: parameters are gathered in the forward and, but for the
        root's, again in the backward pass of each micro-batch, and gradients are reduced and scattered once, each
        ``(n - 1) / n`` times their size (arXiv:1910.02054, section 7.2.2). Buffers, which DDP broadcasts, and what pads
        uneven parts are not counted.
        """
        total = 2 * self.sent if strategy == "ddp" else (2 * self.gathered - self.root) * self.accumulation + self.sent
        return total * (ranks - 1) // ranks


@dataclass(frozen=True)
class Row:
    """The estimate for a number of nodes and a strategy; what is unknown is None.

    Attributes:
        memory: peak bytes of a rank, without CUDA's context.
        fits: memory in GiB of the smallest common GPU that holds it; None too if none does.
        sends: bytes that a rank sends in a step.
        seconds: of the communication of a step, if nothing is computed meanwhile.
        network: over which network.
        is_shared: whether gradients go through the memory of the machine, not over the network.
        rank_batch: samples of a rank in a micro-batch.
        effective_batch: samples of all ranks in a step.
        divides: whether all ranks get equally many samples.
    """

    nodes: int
    ranks: int
    strategy: Strategy
    memory: int | None
    fits: int | None
    sends: int
    seconds: float | None
    network: str | None
    is_shared: bool
    rank_batch: int | None
    effective_batch: int | None
    divides: bool


def rows(needs: Needs, nodes: Iterable[int], ranks_per_node: int, networks: Sequence[Network]) -> list[Row]:
    """Return the estimate for each number of nodes and each strategy that makes a difference there."""
    found = []
    networks = sorted(networks, key=lambda each: each.place == "both")  # A rate counts where no name does.
    for number in nodes:
        ranks = number * ranks_per_node
        network = next((each for each in networks if each.serves(number)), None)
        for strategy in STRATEGIES if ranks > 1 else STRATEGIES[:1]:
            memory, sends = needs.memory(strategy, ranks), needs.sends(strategy, ranks)
            found.append(
                Row(
                    nodes=number,
                    ranks=ranks,
                    strategy=strategy,
                    memory=memory,
                    fits=None if memory is None else smallest_gpu(memory),
                    sends=sends,
                    seconds=_seconds(needs, strategy, ranks, number, network),
                    network=network.name if network else None,
                    is_shared=_is_shared(needs, strategy, number, network),
                    rank_batch=needs.rank_batch(ranks),
                    effective_batch=needs.effective_batch(ranks),
                    divides=not (needs.global_batch and needs.global_batch % ranks),
                )
            )
    return found


def _is_shared(needs: Needs, strategy: Strategy, nodes: int, network: Network | None) -> bool:
    """Return True if ranks average gradients through the memory of their machine, and send none."""
    is_measured = network is not None and SHARED_MEMORY in network.curves
    return is_measured and strategy == "ddp" and nodes == 1 and needs.shared > 0


def _seconds(needs: Needs, strategy: Strategy, ranks: int, nodes: int, network: Network | None) -> float | None:
    """Return how long the communication of a step takes, if nothing is computed meanwhile; None if it is unknown."""
    if ranks == 1:
        return 0.0
    if network is None:
        return None
    if _is_shared(needs, strategy, nodes, network):
        return network.seconds(SHARED_MEMORY, needs.shared)
    messages = _of_ddp(needs, network) if strategy == "ddp" else _of_fsdp(needs)
    return sum(network.seconds(name, size * (ranks - 1) / ranks) for name, size in messages)


def _of_ddp(needs: Needs, network: Network) -> Iterator[tuple[str, float]]:
    """Yield each all-reduce, with what infinitely many ranks would send: twice its bytes."""
    for size in needs.messages_of_cpus if network.on_cpus else needs.messages:
        yield "all_reduce", 2 * size


def _of_fsdp(needs: Needs) -> Iterator[tuple[str, float]]:
    """Yield what gathers the root once, and each other part twice, in a micro-batch, and what scatters gradients."""
    rest = needs.gathered - needs.root - sum(needs.units)
    parts = [each for each in (*needs.units, rest) if each > 0]
    for size in [needs.root, *parts, *parts] * needs.accumulation:
        if size:
            yield "all_gather", size
    for size in (needs.root, *parts):
        if size:
            yield "reduce_scatter", size * needs.sent / needs.gathered


def smallest_gpu(size: int) -> int | None:
    """Return the memory, in GiB, of the smallest common GPU that holds so many bytes; None if none does."""
    return next((memory for memory in GPUS if size + CONTEXT_BYTES <= memory * GIB), None)


def from_numbers(count: int, dtype: str, optimizer: str, activations: int | None) -> Needs:
    """Return what a model of ``count`` parameters needs that all train; the gradients have the parameters' type."""
    size, (states, bytes_each) = DTYPES[dtype], OPTIMIZERS[optimizer]
    parameters, state = count * size, count * states * (bytes_each or size)
    return Needs(
        count=count,
        parameters=parameters,
        gradients=parameters,
        optimizer_state=state,
        activations=activations,
        sent=parameters,
        gathered=parameters,
        units=(),
        root=0,
        checkpoint=parameters + state,
        # As one: with buckets of 25 MiB the rate decides, and a large model has millions of them.
        messages=(parameters,),
        messages_of_cpus=(parameters,),
    )


def from_step(step: MeasuredStep) -> Needs:
    """Return what a measured step used; FSDP gathers parameters in the precision of the training."""
    narrow = step.count * DTYPES[step.precision]
    factor = narrow / step.parameters if step.parameters and narrow < step.parameters else 1.0
    return Needs(
        count=step.count,
        parameters=step.parameters,
        gradients=step.gradients,
        optimizer_state=step.optimizer_state,
        activations=step.activations,
        sent=step.sent,
        gathered=round(step.parameters * factor),
        units=tuple(round(unit * factor) for unit in step.units),
        root=round(step.root * factor),
        checkpoint=step.parameters + step.buffers + step.optimizer_state
        if step.checkpoint is None
        else step.checkpoint,
        messages=step.messages,
        messages_of_cpus=step.messages_of_cpus,
        shared=step.shared,
        buffers=step.buffers,
        temporaries=step.temporaries,
        batch=step.batch,
        global_batch=step.global_batch,
        accumulation=step.accumulation,
    )


@dataclass(frozen=True)
class Pace:
    """How fast the job of a row is; what is unknown is None.

    Attributes:
        step_seconds: of a step at most: its computation, and then its communication.
        speedup: samples per second compared with the first row; each rank has as many of them if the batch is unknown.
        cost: of as many samples as 1,000 steps of the first row have, in the currency of the price.
    """

    step_seconds: float | None = None
    speedup: float | None = None
    cost: float | None = None


def paces(needs: Needs, rows: Sequence[Row], compute: float, price: float | None) -> list[Pace]:
    """Return the pace of each row.

    A rank computes for longer with more samples, in proportion; communication is not hidden behind computation, so that
    a step takes as long as is given here, or less.

    Args:
        needs: of the job.
        rows: its estimate.
        compute: seconds that a rank of the first row computes in a step.
        price: of a rank for an hour.
    """
    found: list[Pace] = []
    batch, base = rows[0].rank_batch, None
    for row in rows:
        own = compute * row.rank_batch / batch if row.rank_batch and batch else compute
        if row.seconds is None:
            found.append(Pace())
            continue
        seconds = own + row.seconds
        rate = (row.effective_batch or row.ranks) / seconds
        base = base or rate
        samples = _STEPS * (rows[0].effective_batch or rows[0].ranks)
        cost = None if price is None else samples / rate / 3600 * row.ranks * price
        found.append(Pace(seconds, rate / base, cost))
    return found
