"""``ctx.optimizer()``: makes an optimizer of a torch class, or adopts one that the script has made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from allranks.errors import RankError
from allranks.runtime.call_errors import meant_by, refused, scale_factor
from allranks.runtime.model.managed_optimizer import Around, Managed
from allranks.runtime.model.wrappers import Buckets, is_sharded, trained

if TYPE_CHECKING:
    from allranks.runtime.context import Context

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def make_optimizer(
    ctx: Context,
    cls: type[OptimizerT] | OptimizerT,
    model: nn.Module | Iterable[Any],
    *,
    clip_norm: float | None = None,
    scale_lr: Literal["linear", "sqrt"] | None = None,
    **options: Any,
) -> OptimizerT:
    """Make an optimizer that steps once per effective batch, fused if torch can.

    ``step()`` and ``zero_grad()`` do nothing between the micro-batches of :meth:`accumulate`;
    ``ctx.progress.stepped`` is True if the last ``step()`` made a step, for a scheduler that counts steps. With
    fp16, a step whose gradients overflowed changes nothing, and counts. The first optimizer of a context counts
    ``ctx.progress.step``.

    Args:
        cls: class of the optimizer, such as ``torch.optim.AdamW``; or an optimizer that the script has made of all
            parameters of the model, without a scheduler yet. The latter becomes an optimizer of this context as it
            is: not fused unless it was made so.
        model: the result of :meth:`prepare`, whose parameters are trained; or parameters, or groups of them.
        clip_norm: maximum norm of all gradients together; larger ones are scaled down, as by
            ``torch.nn.utils.clip_grad_norm_``.
        scale_lr: multiply ``lr``, which is then meant for one rank, by the number of ranks (``"linear"``, Goyal et
            al. 2017, arXiv:1706.02677) or by its square root (``"sqrt"``, Krizhevsky 2014, arXiv:1404.5997).
        options: arguments of the class, such as ``lr`` and ``weight_decay``; ``fused`` and ``foreach`` are passed
            on as given.

    Returns:
        An instance of ``cls``, which schedulers accept. With ``clip_norm``, its ``grad_norm`` is the norm of the
        last step's gradients before they were clipped.

    Raises:
        RankError: there are no parameters, or no ``lr`` to scale; ``scale_lr`` is unknown; or the optimizer has
            other parameters than the model, or already has a scheduler.
    """
    is_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not is_class and not isinstance(cls, torch.optim.Optimizer):
        raise RankError(
            f"ctx.optimizer() got {type(cls).__name__} as its first argument",
            why="expected the class of an optimizer",
            fix="ctx.optimizer(torch.optim.SGD, model, lr=0.1)",
        )
    module = model if isinstance(model, nn.Module) else None
    groups: list[Any] = list(model) if module is None else list(trained(module).values())  # type: ignore[arg-type]
    if not groups:
        raise RankError("the optimizer got no parameters", fix="ctx.optimizer(cls, model), or parameters that train")
    if isinstance(cls, torch.optim.Optimizer):
        made = _adopt(cls, groups, [*options, *(["scale_lr"] if scale_lr else [])])
    else:
        _check_options(cls, options)
        if scale_lr is not None:
            options = _scaled_lr(cls, groups, options, scale_lr, ctx.world_size)
        made = _make(cls, groups, options)
    sharded = module is not None and is_sharded(module)
    made._around = Around(
        ctx=ctx,
        progress=ctx.progress,
        model=module,
        sharded=sharded,
        parameters=frozenset(map(id, _tensors(groups))),
        scaler=ctx.scaler if ctx.precision == "fp16" else None,
        clip_norm=clip_norm,
        counts_steps=not ctx.progress.counted,
        check_used=(sharded or isinstance(module, Buckets)) and bool(module.all_used),  # type: ignore[union-attr]
        weighed=ctx.progress.weighed,
        backwards=ctx.progress.backwards,
    )
    ctx.progress.counted = True
    return cast("OptimizerT", made)


def _check_options(cls: type[torch.optim.Optimizer], options: Iterable[str]) -> None:
    """Check that all options are ours or the class's; the class would reject a misspelled one without a hint."""
    known = inspect.signature(cls).parameters
    others = [word for word in options if word not in known]
    if others and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        fix = meant_by(others[0], [*known, "clip_norm", "scale_lr"]) or "leave it out"
        what = f"neither ctx.optimizer() nor {cls.__name__} has an argument {others[0]!r}"
        raise refused([*known.values()], what, fix)


def _adopt(optimizer: torch.optim.Optimizer, groups: list[Any], options: list[str]) -> Managed:
    """Turn an optimizer that the script has made into a managed one, with its state."""
    kind = type(optimizer).__name__
    held = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
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


def _managed(cls: Any) -> type[Managed]:
    """Return a class that combines ``Managed`` with torch's class, under the name of torch's."""
    if not getattr(cls.step, "hooked", False):
        # As torch does for the first object of a class: adds profiling and step hooks.
        cls.step = cls.profile_hook_step(cls.step)
        cls.step.hooked = True
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Managed, cls), names)


def _make(cls: type[torch.optim.Optimizer], groups: list[Any], options: dict[str, Any]) -> Managed:
    """Make the optimizer, fused if that is possible and the script did not decide otherwise."""
    managed: Callable[..., Managed] = _managed(cls)
    if _may_fuse(cls, groups, options):
        try:
            return managed(groups, **options, fused=True)
        except RuntimeError:
            pass  # This class has no fused step for this device or dtype.
    return managed(groups, **options)


def _may_fuse(cls: type[torch.optim.Optimizer], groups: list[Any], options: dict[str, Any]) -> bool:
    decided = {"fused", "foreach", "differentiable"} & options.keys()
    if decided or isinstance(options.get("lr"), Tensor) or "fused" not in inspect.signature(cls).parameters:
        return False
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    devices = _get_fused_kernels_supported_devices()
    tensors = _tensors(groups)
    if any(hasattr(tensor, "full_tensor") for tensor in tensors) and not issubclass(cls, (Adam, AdamW)):
        return False  # DTensor supports the fused steps of these classes only.
    return all(tensor.is_floating_point() and tensor.device.type in devices for tensor in tensors)


def _tensors(groups: list[Any]) -> list[Tensor]:
    """Return the tensors of a list of parameters, of named parameters, or of groups of either."""
    found: list[Tensor] = []
    for entry in groups:
        if isinstance(entry, dict):
            inside = entry["params"]
            entry["params"] = inside = [inside] if isinstance(inside, Tensor) else list(inside)
            found += _tensors(inside)
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def _scaled_lr(
    cls: type[torch.optim.Optimizer], groups: list[Any], options: dict[str, Any], rule: str, world_size: int
) -> dict[str, Any]:
    """Return the options with a scaled learning rate; also scale those in the groups, in place."""
    factor = scale_factor("scale_lr", rule, world_size)
    for number, group in enumerate(groups):
        if isinstance(group, dict) and "lr" in group:
            groups[number] = {**group, "lr": group["lr"] * factor}
    rate = options.get("lr", inspect.signature(cls).parameters["lr"].default)
    if rate is inspect.Parameter.empty:
        raise RankError(f"scale_lr={rule!r} without lr=", fix=f"ctx.optimizer({cls.__name__}, ..., lr=...)")
    return {**options, "lr": rate * factor}
