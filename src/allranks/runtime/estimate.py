"""Measures one optimizer step for ``allranks estimate``: its memory, and the traffic between ranks.

The step is a real one of one rank on the CPU, with the job's data. Fake tensors would need no memory, but have no
values, which metrics, schedules and most scripts read (``loss.item()``). The process exits after the step, so that it
writes no checkpoint, metric or tracker record.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks import contract
from allranks.record.estimate import BUCKET, FIRST_BUCKET, MeasuredStep
from allranks.runtime.context import Context
from allranks.runtime.data.mapped import batch_sizes
from allranks.runtime.model.allreduce import LEAST
from allranks.runtime.model.flat_gradients import LARGE
from allranks.runtime.model.prepare import choose
from allranks.runtime.model.wrappers import DTYPES, trained


class Storages(TorchDispatchMode):
    """Records when memory of tensors is allocated and freed, from the operations that use it.

    Attributes:
        events: number of a storage and its bytes, negative when it is freed.
        parameters: those that operations have read, by ``id``.
        persistent: numbers of storages of parameters and of their gradients.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.parameters: dict[int, nn.Parameter] = {}
        self.persistent: set[int] = set()
        self.ended = 0  # number of events when the last gradient was computed
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the tensors that it reads and returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self.parameters:
                self.keep(leaf)
            elif isinstance(leaf, Tensor):
                self.number(leaf)
        return result

    def keep(self, parameter: nn.Parameter) -> None:
        """Count a parameter and its gradients as persistent."""
        self.parameters[id(parameter)] = parameter
        self.persistent.add(self.number(parameter))
        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.persistent.add(self.number(parameter.grad))
        self.ended = len(self.events)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage (new storages get the next one); -1 for a tensor without storage."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # A sparse tensor, or one of another kind.
            return -1
        key = id(storage)
        if key not in self._live:
            self._count += 1
            self._live[key] = self._watched(storage, key, self._count)
        return self._live[key][1]

    def _watched(self, storage: Any, key: int, number: int) -> tuple[weakref.ref[Any], int]:
        size = storage.nbytes()
        self.events.append((number, size))

        def forget(_: object) -> None:
            del self._live[key]
            self.events.append((number, -size))

        return weakref.ref(storage, forget), number

    def peaks(self, step: int, persistent: set[int]) -> tuple[int, int]:
        """Return the peaks, in bytes, of memory that is not persistent: up to event ``step``, and after it."""
        now = before = after = 0
        for place, (number, size) in enumerate(self.events):
            now += 0 if number in persistent else size
            if place < step:
                before = max(before, now)
            else:
                after = max(after, now)
        return before, after


class MeasuredContext(Context):
    """A context that writes what the first optimizer step used, and then ends the process."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._step.path.touch()  # Marks that the script has called allranks.init().

    @cached_property
    def _step(self) -> _Step:
        return _Step(self)

    def prepare(self, module: nn.Module, **options: Any) -> nn.Module:
        """Prepare a model for one rank, without compiling it."""
        self._step.models.append((module, {"strategy": "auto", **options}))
        return super().prepare(module, **{**options, "compile": False})

    def loader(self, dataset: Any, **options: Any) -> Any:
        """Make a loader for this process, with the batch size of a rank of the job."""
        size = batch_sizes(options.get("batch_size"), options.get("global_batch_size"), self._step.ranks)
        self._step.batches.append((size.rank, options.get("global_batch_size")))
        return super().loader(dataset, **{**options, "batch_size": size.rank, "global_batch_size": None, "workers": 0})

    def optimizer(self, cls: Any, model: Any, **options: Any) -> Any:
        """Make an optimizer whose first step the measurement includes."""
        made = super().optimizer(cls, model, **options)
        self._step.expected[id(made)] = made
        return made

    def checkpoints(self, folder: str | Path, **options: Any) -> Any:
        """Check the parts, without loading or writing anything."""
        own = ("keep", "best", "every", "config", "background", "leave_before", "save_at_end", "resume")
        self._step.parts = [part for name, part in options.items() if name not in own]
        return super().checkpoints(self._step.path.parent / "checkpoints", **{**options, "resume": False})


class _Step:
    """The measured step."""

    def __init__(self, ctx: Context) -> None:
        ranks, _, path = os.environ[contract.ESTIMATE].partition(":")
        self.path, self.ranks = Path(path), int(ranks)
        self.models: list[tuple[nn.Module, dict[str, Any]]] = []
        self.batches: list[tuple[int, int | None]] = []
        self.expected: dict[int, torch.optim.Optimizer] = {}
        self.parts: list[Any] | None = None
        self._ctx = ctx
        self._storages = Storages()
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        self._started = self._step_event = 0
        self._hook = register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(self._on_step)
        register_optimizer_step_post_hook(self._on_stepped)

    def _on_forward(self, module: nn.Module, _: object) -> None:
        """Start recording at the first forward pass in training mode."""
        if torch.is_grad_enabled() and module.training and trained(module):
            self._hook.remove()
            if not self.models:
                self.models.append((module, {}))
            self._storages.__enter__()  # type: ignore[no-untyped-call]

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._stepped:
            self._step_event = len(self._storages.events)

    def _on_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Write the result and exit once all optimizers of the context have made a step."""
        self._stepped[id(optimizer)] = optimizer
        if self.expected.keys() <= self._stepped.keys():
            if self._storages.events:
                self._storages.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._result().write(self.path)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _result(self) -> MeasuredStep:
        storages, optimizers = self._storages, [*self._stepped.values()]
        parameters, buffers = dict[int, Tensor](), dict[int, Tensor]()
        for model, _ in self.models:
            parameters |= {id(each): each for each in model.parameters()}
            buffers |= {id(each): each for each in model.buffers()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters |= {id(each): each for each in group["params"]}
        parameters |= storages.parameters
        gradients = [each.grad for each in parameters.values() if each.grad is not None]
        state = [leaf for one in optimizers for leaf in _tensors(one.state.values())]
        has_seen = bool(storages.events)
        held = [*parameters.values(), *buffers.values(), *gradients, *state]
        persistent = {*storages.persistent, *map(storages.number, held)}
        # The backward pass ends with its last gradient; an optimizer with a closure runs it inside its step.
        activations, temporaries = storages.peaks(max(self._step_event, storages.ended), persistent)
        batch, total = self.batches[0] if self.batches else (None, None)
        prepared = [each for each in self.models if each[1]]
        options = prepared[0][1] if prepared else {}
        units = [_units(*each) for each in self.models]  # A script that prepares no model: the first one that ran.
        gpus, cpus = (self._traffic(prepared, device, gradients) for device in ("cuda", "cpu"))
        return MeasuredStep(
            count=sum(each.numel() for each in parameters.values()),
            parameters=_bytes(parameters.values()),
            buffers=_bytes(buffers.values()),
            gradients=_bytes(gradients),
            sent=sum(gpus.messages),
            messages=gpus.messages,
            messages_of_cpus=cpus.messages,
            shared=cpus.shared,
            optimizers=tuple(dict.fromkeys(type(one).__name__ for one in optimizers)),
            optimizer_state=_bytes(state),
            activations=activations if has_seen else None,
            temporaries=temporaries,
            units=tuple(unit for found, _ in units for unit in found),
            root=sum(root for _, root in units),
            checkpoint=None if self.parts is None else _bytes(_saved(self.parts)),
            strategy=options.get("strategy"),
            precision=self._ctx.precision,
            recomputed=tuple(kind.__name__ for kind in options.get("checkpoint_activations", ())),
            batch=batch,
            global_batch=total,
            accumulation=self._ctx.progress.accumulation,
        )

    def _traffic(self, models: list[tuple[nn.Module, dict[str, Any]]], device: str, gradients: list[Tensor]) -> Traffic:
        """Return the traffic of data parallelism: torch's DDP if the script prepares no model."""
        if not models:
            return of_buckets(gradients)
        found = [_traffic_of(*each, device, deterministic=self._ctx.deterministic) for each in models]
        return Traffic(tuple(size for one in found for size in one.messages), sum(one.shared for one in found))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _traffic_of(model: nn.Module, options: dict[str, Any], device: str, *, deterministic: bool) -> Traffic:
    """Return the traffic for the gradients of all trained parameters, unless they are sharded."""
    kind, strategy = DTYPES.get(options.get("compress") or ""), options["strategy"]
    if strategy not in ("ddp", "flat"):
        strategy = choose(model, device, deterministic=deterministic)
    of = of_flat if strategy == "flat" else of_buckets
    return of(trained(model).values(), kind.itemsize if kind else None)


def _units(model: nn.Module, options: dict[str, Any]) -> tuple[list[int], int]:
    """Return the bytes of each module that FSDP gathers separately, and of the rest, gathered with the root."""
    kinds, left, found = tuple(options.get("shard", ())), {id(each): each for each in model.parameters()}, []
    for part in model.modules():
        if part is not model and isinstance(part, kinds):
            own = [each for each in part.parameters() if left.pop(id(each), None) is not None]
            found.append(_bytes(own))
    return found, _bytes(left.values())


def _saved(parts: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a checkpoint of these parts holds."""
    for part in parts:
        if hasattr(part, "state_dict"):
            yield from _tensors([part.state_dict()])


# --- the messages in which ranks average gradients ---


class Traffic(NamedTuple):
    """Bytes of gradients in a step.

    Attributes:
        messages: of each all-reduce.
        shared: what ranks on the CPUs of one machine average through memory instead; 0 if they do not.
    """

    messages: tuple[int, ...]
    shared: int = 0


def of_buckets(parameters: Iterable[Tensor], itemsize: int | None = None) -> Traffic:
    """Return the messages of torch's DistributedDataParallel; ``itemsize`` is the bytes per element, None the dtype's.

    After the first step torch rebuilds its buckets in the order in which gradients are ready: that of the parameters,
    reversed (``Reducer::rebuild_buckets``, ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d).
    """
    messages = []
    for group in _by_type(parameters):
        limit, held, sent = FIRST_BUCKET, 0, 0
        for parameter in reversed(group):
            held += parameter.nbytes
            sent += parameter.numel() * (itemsize or parameter.element_size())
            if held >= limit:
                messages.append(sent)
                limit, held, sent = BUCKET, 0, 0
        if held:
            messages.append(sent)
    return Traffic(tuple(messages))


def of_flat(parameters: Iterable[Tensor], itemsize: int | None = None) -> Traffic:
    """Return the messages of :class:`allranks.runtime.model.flat_gradients.Flat`; ``itemsize`` as for buckets."""
    messages, shared = [], 0
    for group in _by_type(parameters):
        size, small = itemsize or group[0].element_size(), 0
        for each in group:
            if each.numel() < LARGE:
                small += each.numel() * size
            else:
                messages.append(each.numel() * size)
        if small:
            messages.append(small)
        total = sum(each.nbytes for each in group)
        if itemsize is None and total >= LEAST:
            shared += total
    return Traffic(tuple(messages), shared)


def _by_type(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.dtype].append(parameter)
    return [*found.values()]
