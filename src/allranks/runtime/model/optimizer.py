"""``ctx.optimizer()``: optimizers of torch that know about micro-batches, ranks and scaled gradients."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

from allranks.errors import RankError
from allranks.runtime import log
from allranks.runtime.call_errors import meant_by, refused, scale_factor
from allranks.runtime.model.backward import Accumulation, weight
from allranks.runtime.model.flat_gradients import Flat, unwrap
from allranks.runtime.model.wrappers import Buckets, is_sharded, trained, unused
from allranks.runtime.progress import advance
from allranks.runtime.steptime import OPTIMIZER, OTHER

if TYPE_CHECKING:
    from allranks.runtime.context import Context
    from allranks.runtime.progress import Progress

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
#: Attribute that ctx.prepare() sets on parameters whose gradients are averaged.
_MARK = "_allranks_averaged"


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler, which here updates the scale itself after all optimizers of a backward pass have stepped.

    Several optimizers may share one backward pass: the scale changes only when the next loss is scaled, or when
    the state is saved.
    """

    due = False

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale."""
        self._adapt()
        return super().scale(outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counters after a pending update."""
        self._adapt()
        return super().state_dict()

    def _adapt(self) -> None:
        if self.due:
            self.due = False
            self.update()

    def unscale_on_all_ranks(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of a sharded model by the scale; an overflow in one rank's part counts for all."""
        self.unscale_(optimizer)
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, overflow in found.items():
            local = overflow.to_local() if hasattr(overflow, "to_local") else overflow
            distributed.all_reduce(local, distributed.ReduceOp.MAX)
            found[device] = local


@dataclass
class Around:
    """The state of the training that a managed optimizer refers to, and counts from its last step.

    Attributes:
        parameters: the trained parameters, by ``id``.
        counts_steps: whether its steps count as steps of the training.
        check_used: whether to look for parameters without gradients.
        weighed, backwards: the counts of the progress at the last step.
        blocks, plain: its counts at the last call of ``step``.
        stepped: whether there was a step.
        consumed: whether a step has used the present gradients.
        in_scaler: whether the scaler is calling the step.
    """

    ctx: Context
    progress: Progress
    model: nn.Module | None
    sharded: bool
    parameters: frozenset[int]
    scaler: Scaler | None
    clip_norm: float | None
    counts_steps: bool
    check_used: bool
    weighed: int
    backwards: int
    blocks: int = 0
    plain: int = 0
    stepped: bool = False
    consumed: bool = False
    in_scaler: bool = False


class Managed(torch.optim.Optimizer):
    """Mix-in that handles micro-batches and ranks; torch's class computes the step."""

    _around: Around
    #: Total norm of all gradients before clipping, on the device; None without clipping.
    grad_norm: Tensor | None = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step once the effective batch is complete; do nothing between its micro-batches."""
        around = self._around
        if around.in_scaler:
            return super().step(closure)
        progress = around.progress
        if _waits(around):
            progress.stepped = False
            return None
        progress.clock.enter(OPTIMIZER)
        if progress.weighed == around.weighed and closure is None:
            if around.stepped:
                _check_new(around)
            around.ctx.metrics.start_step()  # ctx.backward does it otherwise.
            _check_plain_backward(around)
        if not around.stepped:
            _check_trains(self, around)
        around.weighed, around.backwards = progress.weighed, progress.backwards
        if isinstance(around.model, Flat):
            _check_averaged(around.model, closure)
        if around.check_used and around.model is not None:
            _check_used(around, around.model)
        result = self._step(around.scaler, closure)
        around.consumed = around.stepped = progress.stepped = True
        progress.clock.enter(OTHER)
        if around.counts_steps:
            progress.step += 1
            progress.clock.count(progress.step, progress.place)
        advance()
        return result

    step.hooked = True  # type: ignore[attr-defined] # Hooks run once, around the step of torch's class.

    def _step(self, scaler: Scaler | None, closure: Callable[[], float] | None) -> float | None:
        """Clip the gradients and step; with a scaler, skip the step if they overflowed."""
        around = self._around
        if scaler is not None and around.sharded:
            scaler.unscale_on_all_ranks(self)
        elif scaler is not None and around.clip_norm is not None:
            scaler.unscale_(self)
        if around.clip_norm is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, around.clip_norm)
        if scaler is None:
            return super().step(closure)
        around.in_scaler = True
        try:
            result: float | None = scaler.step(self)
        finally:
            around.in_scaler = False
        scaler.due = True
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless they belong to an incomplete effective batch.

        So it may be called before the backward pass or after the step. A complete effective batch that no step has
        used, for example after an error, is dropped.
        """
        around, progress = self._around, self._around.progress
        adds_up = progress.accumulation > 1 and (progress.open > 0 or not progress.is_boundary)
        if not around.consumed and (adds_up or _own_unfinished(around)):
            return
        around.consumed = False
        super().zero_grad(set_to_none)


def _own_unfinished(around: Around) -> list[Accumulation]:
    """Return the effective batches of the optimizer's parameters that wait for further micro-batches."""
    unfinished = [one for one in around.progress.groups.values() if one.unfinished]
    return [one for one in unfinished if one.model is around.model or one.trains(around.parameters)]


def _waits(around: Around) -> bool:
    """Whether gradients wait for further micro-batches."""
    progress = around.progress
    own = _own_unfinished(around)
    if not own and progress.is_boundary:
        around.blocks, around.plain = progress.blocks, progress.plain
        return False
    left = around.blocks == progress.blocks and (around.plain != progress.plain or around.ctx.world_size == 1)
    around.blocks, around.plain = progress.blocks, progress.plain
    if not left:
        return True
    if own:
        raise RankError(
            f"optimizer.step() with an effective batch that was left after {own[0].words()}",
            why="its gradients would be added to those of a backward pass outside of ctx.accumulate",
            fix="finish it; or put that backward pass into ctx.accumulate(model, steps=1), which drops what was left",
        )
    progress.accumulation, progress.micro = 1, 0
    return False


def _check_new(around: Around) -> None:
    """Check that there was a backward pass since the last step; not in a world of one rank."""
    # The script may average parameters itself if it gave no model; a flat model tracks this itself.
    counted = around.sharded or isinstance(around.model, Buckets)
    if counted and around.progress.backwards == around.backwards:
        raise RankError(
            "optimizer.step() without a backward pass since the last step",
            why="the same gradients would be applied twice",
            fix="call optimizer.step() once after each ctx.backward(loss)",
        )


def _check_plain_backward(around: Around) -> None:
    """Check that a plain ``loss.backward()`` was enough, instead of ``ctx.backward``."""
    progress, world_size = around.progress, around.ctx.world_size
    fix = "ctx.backward(loss), not loss.backward()"
    if around.scaler is not None:
        why = "with fp16 the loss has to be scaled, or small gradients become zero"
    elif progress.accumulation > 1:
        why = f"gradients of {progress.accumulation} micro-batches are added up, and have to be divided"
    elif weight(progress, world_size) != 1.0:
        why = f"this rank has {progress.samples} of {progress.total} samples of the batch, not its even share"
    elif progress.last is not None and progress.last % world_size:
        why = f"the last batch of the epoch has {progress.last} samples for {world_size} ranks, no even shares"
        fix += ", or ctx.loader(..., drop_last=True)"
    else:
        return
    raise RankError("optimizer.step() without ctx.backward(loss)", why=why, fix=fix)


def _check_averaged(flat: Flat, closure: object) -> None:
    """Check that the gradients were averaged over the ranks."""
    if not flat.averaged and closure is None:
        raise RankError(
            "optimizer.step() with gradients that were not averaged over the ranks",
            why="no backward pass went through what the prepared model returned since the last step",
            fix='call the object that ctx.prepare() gave, not the model inside; where that cannot be, strategy="ddp"',
        )
    flat.averaged = False


def _check_used(around: Around, model: nn.Module) -> None:
    """Check that all parameters got gradients: in the first step, because torch checks only one step later.

    A sharded model, which torch does not check, is checked in each step.
    """
    around.check_used = around.sharded
    missing = [name for name, parameter in trained(unwrap(model)).items() if parameter.grad is None]
    if missing:
        raise unused(missing, around.ctx.rank)


def mark(model: nn.Module) -> nn.Module:
    """Mark the parameters of a data-parallel model, whose gradients are averaged."""
    for parameter in model.parameters():
        setattr(parameter, _MARK, True)
    return model


def _check_trains(optimizer: Managed, around: Around) -> None:
    """Check that the backward pass reached the optimizer's parameters; warn if each rank trains its own model.

    Raises:
        RankError: there was a backward pass, and no parameter has a gradient.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    has_passed = around.progress.weighed != around.weighed
    if has_passed and all(parameter.grad is None for parameter in parameters):
        raise RankError(
            "optimizer.step() would train nothing: no parameter of the optimizer has a gradient",
            why="ctx.backward() computed those of other parameters: sharding by ctx.prepare() replaces parameters, "
            "and a copy of a model has its own",
            fix='first model = ctx.prepare(model, strategy="fsdp"), then ctx.optimizer(..., model)',
        )
    ctx = around.ctx
    if ctx.is_main and ctx.world_size > 1 and not _are_averaged(parameters):
        log(
            f"warning: the model of this optimizer was not given to ctx.prepare(): each of the {ctx.world_size} ranks "
            "trains one of its own, unless the script averages the gradients; write model = ctx.prepare(model)"
        )


def _are_averaged(parameters: list[Tensor]) -> bool:
    """Whether ctx.prepare() or a wrapper of torch averages the gradients, as far as can be detected."""
    if any(hasattr(parameter, _MARK) or hasattr(parameter, "full_tensor") for parameter in parameters):
        return True
    # Parameters have no reference to the wrapper of their model. Only scripts with an error reach this search.
    kinds = {type(each) for each in gc.get_objects()}
    return any(
        issubclass(kind, DistributedDataParallel) or kind.__name__ == "FullyShardedDataParallel" for kind in kinds
    )


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
