"""The JSON file with the measurements of one step, for ``allranks estimate``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.record.files import write_atomically

#: Bucket sizes of torch's DistributedDataParallel in bytes: of the first bucket, and of all others.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
#: Name in a self-test of averaging gradients through shared memory.
SHARED_MEMORY = "shared memory"


@dataclass(frozen=True)
class MeasuredStep:
    """Usage of one optimizer step, in bytes, on a rank that holds the complete model.

    Attributes:
        count: number of parameter elements.
        parameters: trained and frozen parameters.
        buffers: of the models.
        gradients: at the optimizer's step.
        sent: gradients that ranks average, in the type in which they are sent; all if the script prepares no model.
        optimizers: names of the optimizers' classes.
        optimizer_state: after the step.
        activations: peak of all other tensors in forward and backward pass, the batch included; None if no module ran.
        temporaries: the same in the optimizer's step.
        messages: sizes of the all-reduces into which ``sent`` is divided, with data parallelism on GPUs.
        messages_of_cpus: the same on CPUs.
        shared: gradients that ranks on the CPUs of one machine average through shared memory; 0 if they send messages.
        units: parameters of each module of the classes in ``shard=``, which FSDP gathers one at a time.
        root: all other parameters, which it gathers together, once in a micro-batch.
        checkpoint: tensors in the parts of ``ctx.checkpoints``; None if the script does not call it.
        strategy: the argument of ``ctx.prepare``; None if the script does not call it.
        precision: the argument of ``allranks.init``.
        recomputed: classes of modules whose activations are recomputed in the backward pass.
        batch: samples of this rank in a micro-batch; None if the script has its own loader.
        global_batch: samples of all ranks in a micro-batch if the script sets a global batch size, else None.
        accumulation: micro-batches in a step.
    """

    count: int
    parameters: int
    buffers: int
    gradients: int
    sent: int
    optimizers: tuple[str, ...]
    optimizer_state: int
    activations: int | None
    temporaries: int
    messages: tuple[int, ...]
    messages_of_cpus: tuple[int, ...]
    shared: int
    units: tuple[int, ...]
    root: int
    checkpoint: int | None
    strategy: str | None
    precision: str
    recomputed: tuple[str, ...]
    batch: int | None
    global_batch: int | None
    accumulation: int

    def write(self, path: Path) -> None:
        """Write it to a file."""
        write_atomically(path, json.dumps(asdict(self)) + "\n", 0o600)


def read_step(path: Path) -> MeasuredStep | None:
    """Read what :meth:`MeasuredStep.write` wrote; None if the file is still empty."""
    if not (text := path.read_text(encoding="utf-8")):
        return None
    found: dict[str, Any] = json.loads(text)
    found.update({key: tuple(value) for key, value in found.items() if isinstance(value, list)})
    return MeasuredStep(**found)
