"""The arithmetic of an estimate: memory of a rank, bytes sent per step, time of a step, cost.

Its tables hold the constants: dtypes, optimizers and GPUs.
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
#: The cost is for as many samples as this many steps of the first row have.
_STEPS = 1000
#: Bytes per element.
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Values that an optimizer keeps per parameter, and the bytes of each; None: those of the parameter's dtype.
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
#: Aliases of these, in lower case.
SAME = {
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("adamw8bit", "adam8bit", "adam-8bit"), "adamw-8bit"),
    **dict.fromkeys(("sgd-momentum", "nesterov"), "momentum"),
}

GIB = 1 << 30
#: Memory of common GPUs in GiB (nvidia-smi's value within 1 %), and the GPUs that have it.
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
#: GPU memory of CUDA's context, cuBLAS and NCCL, beside torch's tensors: 0.5 to 1 GB; the larger value is assumed.
CONTEXT_BYTES = GIB


@dataclass(frozen=True)
class Needs:
    """The needs of a training in bytes, on a rank that holds the complete model.

    See :class:`MeasuredStep` for the attributes that both have.

    Attributes:
        gathered: all parameters, in the type in which FSDP gathers them.
        units: the modules that it gathers one at a time.
        root: the part that it gathers with the root module, once in a micro-batch.
        checkpoint: size of a checkpoint.
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
        """Return the peak memory per rank in bytes, without CUDA's context; None if activations are unknown.

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
        """Return the bytes of activations of a rank, assumed to be proportional to its samples."""
        batch = self.rank_batch(ranks)
        if self.activations is None or batch is None or not self.batch:
            return self.activations
        return round(self.activations * batch / self.batch)

    def rank_batch(self, ranks: int) -> int | None:
        """Return the samples per rank in a micro-batch, rounded up; None if unknown."""
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
        seconds: communication time of a step, without overlap with computation.
        network: name of the network.
        is_shared: whether gradients go through shared memory instead of the network.
        rank_batch: samples of a rank in a micro-batch.
        effective_batch: samples of all ranks in a step.
        divides: whether all ranks get the same number of samples.
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
    """Return the estimate for each number of nodes and each strategy that differs there."""
    found = []
    # A plain rate applies only where no named network does.
    networks = sorted(networks, key=lambda each: each.place == "both")
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
    """Return True if ranks average gradients through shared memory and send none."""
    is_measured = network is not None and SHARED_MEMORY in network.curves
    return is_measured and strategy == "ddp" and nodes == 1 and needs.shared > 0


def _seconds(needs: Needs, strategy: Strategy, ranks: int, nodes: int, network: Network | None) -> float | None:
    """Return the communication time of a step in seconds, without overlap with computation; None if unknown."""
    if ranks == 1:
        return 0.0
    if network is None:
        return None
    if _is_shared(needs, strategy, nodes, network):
        return network.seconds(SHARED_MEMORY, needs.shared)
    messages = _of_ddp(needs, network) if strategy == "ddp" else _of_fsdp(needs)
    return sum(network.seconds(name, size * (ranks - 1) / ranks) for name, size in messages)


def _of_ddp(needs: Needs, network: Network) -> Iterator[tuple[str, float]]:
    """Yield each all-reduce with the bytes that a rank sends in the limit of many ranks: twice its size."""
    for size in needs.messages_of_cpus if network.on_cpus else needs.messages:
        yield "all_reduce", 2 * size


def _of_fsdp(needs: Needs) -> Iterator[tuple[str, float]]:
    """Yield the all-gathers (the root once, other units twice per micro-batch) and reduce-scatters, with bytes."""
    rest = needs.gathered - needs.root - sum(needs.units)
    parts = [each for each in (*needs.units, rest) if each > 0]
    for size in [needs.root, *parts, *parts] * needs.accumulation:
        if size:
            yield "all_gather", size
    for size in (needs.root, *parts):
        if size:
            yield "reduce_scatter", size * needs.sent / needs.gathered


def smallest_gpu(size: int) -> int | None:
    """Return the memory, in GiB, of the smallest common GPU that holds ``size`` bytes; None if none does."""
    return next((memory for memory in GPUS if size + CONTEXT_BYTES <= memory * GIB), None)


def from_numbers(count: int, dtype: str, optimizer: str, activations: int | None) -> Needs:
    """Return the needs of a model with ``count`` trained parameters; gradients have the parameters' dtype."""
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
        # One message: with buckets of 25 MiB only the rate matters, and a large model would have very many.
        messages=(parameters,),
        messages_of_cpus=(parameters,),
    )


def from_step(step: MeasuredStep) -> Needs:
    """Return the needs of a measured step; FSDP gathers parameters in the precision of the training."""
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
    """Speed and cost of a row; unknown values are None.

    Attributes:
        step_seconds: upper bound of a step's time: computation plus communication.
        speedup: samples per second relative to the first row; equal batches per rank are assumed if they are unknown.
        cost: cost of as many samples as 1,000 steps of the first row have, in the currency of the price.
    """

    step_seconds: float | None = None
    speedup: float | None = None
    cost: float | None = None


def paces(needs: Needs, rows: Sequence[Row], compute: float, price: float | None) -> list[Pace]:
    """Return the pace of each row.

    Computation time is proportional to a rank's samples. Communication does not overlap with computation, so the result
    is an upper bound.

    Args:
        needs: needs of the job.
        rows: its estimates.
        compute: computation time of a step on a rank of the first row, in seconds.
        price: price of one rank per hour.
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
