"""Makes optimizers that know about micro-batches, ranks and scaled gradients, of a class or an object of torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from allranks.errors import RankError
from allranks.runtime.model.flat import Flat
from allranks.runtime.model.optimizing import Around, Managed
from allranks.runtime.model.sharding import is_sharded, uses_all
from allranks.runtime.model.wrappers import trained

if TYPE_CHECKING:
    from allranks.runtime.context import Context

    #: A class, or an object that the script has made of it.
    AnyOptimizer = type[torch.optim.Optimizer] | torch.optim.Optimizer


@dataclass(frozen=True)
class Asked:
    """What ``ctx.optimizer`` was asked for; see there."""

    clip_norm: float | None = None
    scale_lr: Literal["linear", "sqrt"] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def make_optimizer(
    ctx: Context,
    cls: AnyOptimizer,
    what: nn.Module | Iterable[Any],
    asked: Asked,
    *,
    counts: bool,
) -> torch.optim.Optimizer:
    """Make an optimizer of a class that is also a ``cls``, or make the script's own such an optimizer.

    Raises:
        RankError: ``cls`` is not an optimizer; see also ``_make`` and ``_adopt``.
    """
    model = what if isinstance(what, nn.Module) else None
    groups: list[Any] = list(trained(model).values()) if model is not None else list(what)  # type: ignore[arg-type]
    if not groups:
        raise RankError("the optimizer got no parameters", fix="ctx.optimizer(cls, model), or parameters that train")
    if isinstance(cls, torch.optim.Optimizer):
        made = _adopt(cls, groups, asked)
    elif isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        made = _make(cls, groups, _scaled_lr(cls, groups, asked, ctx.world_size))
    else:
        raise RankError(
            f"ctx.optimizer() got {type(cls).__name__} as its first argument",
            why="expected the class of an optimizer",
            fix="ctx.optimizer(torch.optim.SGD, model, lr=0.1)",
        )
    flat = model if isinstance(model, Flat) else None
    made._around = Around(
        progress=ctx.progress,
        world_size=ctx.world_size,
        rank=ctx.rank,
        scaler=ctx.scaler if ctx.precision == "fp16" else None,
        model=model,
        flat=flat,
        sharded=model is not None and is_sharded(model),
        clip_norm=asked.clip_norm,
        counts=counts,
        all_used=_looks_for_unused(model),
        begin_step=ctx.metrics.begin_step,
        parameters=frozenset(map(id, _tensors(groups))),
        counted=_looks_counted(model),
        weighed=ctx.progress.weighed,
        backwards=ctx.progress.backwards,
    )
    return made


def _adopt(optimizer: torch.optim.Optimizer, groups: list[Any], asked: Asked) -> Managed:
    """Turn an optimizer that the script has made, with all it holds, into one that knows about ranks.

    Raises:
        RankError: it would not do what the script expects.
    """
    kind = type(optimizer).__name__
    held = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    options = [*asked.options, *(["scale_lr"] if asked.scale_lr else [])]
    if isinstance(optimizer, Managed):
        why = "ctx.optimizer() has returned it before"
    elif "step" in vars(optimizer):
        why = "its step() was replaced, as a scheduler does: make the scheduler with what ctx.optimizer() returns"
    elif options:
        why = f"it has its options already, and would not take {', '.join(options)}"
    elif held != {id(one) for one in _tensors(groups) if one.requires_grad}:
        why = "its parameters are not those that the model has now, after ctx.prepare()"
    else:
        optimizer.__class__ = made = _managed(type(optimizer))
        assert isinstance(optimizer, made)
        return optimizer
    fix = f"give the class, and let the context make the optimizer: ctx.optimizer(torch.optim.{kind}, model, lr=...)"
    raise RankError(f"ctx.optimizer() cannot use this {kind}", why=why, fix=fix)


def _looks_counted(model: nn.Module | None) -> bool:
    from allranks.runtime.model.buckets import Buckets

    return isinstance(model, (Buckets, Flat)) or (model is not None and is_sharded(model))


def _looks_for_unused(model: nn.Module | None) -> bool:
    from allranks.runtime.model.buckets import Buckets

    return (isinstance(model, Buckets) and model.all_used) or (model is not None and uses_all(model))


def _managed(cls: Any) -> type[Managed]:
    """Make the class that is both ours and torch's; its name is that of torch's."""
    if not getattr(cls.step, "hooked", False):
        # What torch does when it makes the first object of a class: profiling, and hooks around the step.
        cls.step = cls.profile_hook_step(cls.step)
        cls.step.hooked = True
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Managed, cls), names)


def _make(cls: type[torch.optim.Optimizer], groups: list[Any], options: dict[str, Any]) -> Managed:
    """Make the object, with the fused step if that is possible and nobody decided otherwise."""
    managed: Any = _managed(cls)
    made: Managed
    if _may_fuse(cls, groups, options):
        try:
            made = managed(groups, **options, fused=True)
            return made
        except RuntimeError:
            pass  # This class has no fused step for this device or type after all.
    made = managed(groups, **options)
    return made


def _may_fuse(cls: type[torch.optim.Optimizer], groups: list[Any], options: dict[str, Any]) -> bool:
    decided = {"fused", "foreach", "differentiable"} & options.keys()
    if decided or isinstance(options.get("lr"), Tensor) or "fused" not in inspect.signature(cls).parameters:
        return False
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    devices = _get_fused_kernels_supported_devices()
    tensors = _tensors(groups)
    if any(hasattr(tensor, "full_tensor") for tensor in tensors) and not issubclass(cls, (Adam, AdamW)):
        return False  # torch knows how to spread only their fused steps over ranks.
    return all(tensor.is_floating_point() and tensor.device.type in devices for tensor in tensors)


def _tensors(groups: list[Any]) -> list[Tensor]:
    """Give the tensors of a list of parameters, of named parameters, or of groups of either."""
    found: list[Tensor] = []
    for entry in groups:
        if isinstance(entry, dict):
            inside = entry["params"]
            entry["params"] = inside = [inside] if isinstance(inside, Tensor) else list(inside)
            found += _tensors(inside)
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def _scaled_lr(cls: type[torch.optim.Optimizer], groups: list[Any], asked: Asked, world_size: int) -> dict[str, Any]:
    """Give the options with the learning rate multiplied, and do so in the groups, which are changed.

    Raises:
        RankError: for another word than linear and sqrt.
    """
    if asked.scale_lr is None:
        return asked.options
    if asked.scale_lr not in ("linear", "sqrt"):
        raise RankError(f"scale_lr={asked.scale_lr!r}", fix='"linear", "sqrt" or None')
    factor = world_size if asked.scale_lr == "linear" else math.sqrt(world_size)
    for number, group in enumerate(groups):
        if isinstance(group, dict) and "lr" in group:
            groups[number] = {**group, "lr": group["lr"] * factor}
    rate = asked.options.get("lr", inspect.signature(cls).parameters["lr"].default)
    if rate is inspect.Parameter.empty:
        raise RankError(f"scale_lr={asked.scale_lr!r} without lr=", fix=f"ctx.optimizer({cls.__name__}, ..., lr=...)")
    return {**asked.options, "lr": rate * factor}
