"""Error messages for wrong calls of the Python API: what is expected, and what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec, TypeGuard, TypeVar

from allranks.errors import CallError, RankError

P = ParamSpec("P")
T = TypeVar("T")

_NOT_NEEDED = "is not needed: leave it out"
_ORDER = "the loader gives each rank its part: shuffle=, seed= and drop_last= describe the order"
#: Arguments of torch's own classes, Lightning and Accelerate, and their equivalents here.
_FOREIGN_ARGUMENTS = {
    "num_workers": "write workers=",
    "prefetch_factor": "write prefetch=",
    **dict.fromkeys(("sampler", "batch_sampler", "num_replicas"), _ORDER),
    "generator": "write seed=",
    "learning_rate": "write lr=",
    **dict.fromkeys(("persistent_workers", "multiprocessing_context", "pin_memory_device"), _NOT_NEEDED),
    **dict.fromkeys(("device_ids", "output_device", "gradient_as_bucket_view"), _NOT_NEEDED),
    **dict.fromkeys(("init_method", "rank", "world_size"), _NOT_NEEDED),
    **dict.fromkeys(("device_mesh", "mesh", "reshard_after_forward"), 'write strategy="fsdp", which decides it'),
    "mixed_precision": 'write precision="bf16"',
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "write ctx.accumulate(model, steps=)"),
    **dict.fromkeys(("log_with", "logger"), 'write trackers=["wandb"]'),
    **dict.fromkeys(("save_every", "interval", "every_n_steps", "every_n_train_steps", "save_steps"), "write every="),
    **dict.fromkeys(("max_to_keep", "save_top_k", "save_total_limit", "total_limit"), "write keep="),
    **dict.fromkeys(("max_norm", "max_grad_norm", "gradient_clip_val", "grad_clip"), "write clip_norm="),
    **dict.fromkeys(("end", "sep", "flush", "file"), "ctx.print() writes whole lines: print() if ctx.is_main"),
}
#: What to write for arguments that a method does not take, by the method's name.
_BY_METHOD = {
    "ctx.prepare": "model = ctx.prepare(model); ctx.optimizer() makes optimizers, ctx.loader() loads data",
    "ctx.checkpoints": 'name what is saved: ctx.checkpoints(ctx.run_dir / "checkpoints", model=model, ...)',
    "checkpoints.save": "checkpoints.save(): what it saves, and where, was given to ctx.checkpoints()",
    "checkpoints.step": "checkpoints.step(): what it saves, and where, was given to ctx.checkpoints()",
    "metrics.log": "name each value: ctx.metrics.log(loss=loss)",
    "metrics.record": "name each value: ctx.metrics.record(accuracy=0.9)",
}
#: Attributes of Accelerate, Lightning and torch, and their equivalents of a context.
_ATTRIBUTES = {
    **dict.fromkeys(("save", "save_state", "load_state", "save_checkpoint", "load"), "ctx.checkpoints(...)"),
    **dict.fromkeys(("is_main_process", "is_global_zero", "is_local_main_process", "is_master"), "ctx.is_main"),
    **dict.fromkeys(("wait_for_everyone", "synchronize"), "ctx.barrier()"),
    **dict.fromkeys(("num_processes", "size", "get_world_size"), "ctx.world_size"),
    **dict.fromkeys(("process_index", "global_rank", "get_rank"), "ctx.rank"),
    "local_process_index": "ctx.local_rank",
    **dict.fromkeys(("log", "log_dict"), "ctx.metrics.log(loss=loss)"),
    **dict.fromkeys(("all_reduce", "reduce", "gather", "mean"), "ctx.sum(...), or torch.distributed"),
    **dict.fromkeys(("clip_grad_norm_", "clip_gradients"), "ctx.optimizer(..., clip_norm=1.0)"),
    **dict.fromkeys(("dataloader", "sampler", "prepare_data_loader"), "ctx.loader(dataset, batch_size=...)"),
    **dict.fromkeys(("unwrap_model", "module"), "ctx.unwrap(model)"),
    **dict.fromkeys(("step", "zero_grad"), "optimizer.step(), of the optimizer that ctx.optimizer() returns"),
}
#: The usual variable names of objects, for messages.
_NAMES = {"Context": "ctx", "Checkpointer": "checkpoints", "Metrics": "metrics", "Loader": "loader"}


def answering(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to explain calls with wrong arguments."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (
                isinstance(error, ValueError)
                and "Default process group" in str(error)
                and getattr(args[0], "_closed", False)
            ):
                raise _after_the_end(function) from None
            if not isinstance(error, TypeError) or (error.__traceback__ and error.__traceback__.tb_next):
                raise  # Raised inside the function, whose arguments were valid.
        raise _explained(function, args, kwargs)

    return call


def meant_by(name: str, options: Iterable[str]) -> str | None:
    """Return what to write instead of an unknown argument; None without a suggestion."""
    if name in _FOREIGN_ARGUMENTS:
        answer = _FOREIGN_ARGUMENTS[name]
        return f"{name}= {answer}" if answer == _NOT_NEEDED else answer
    close = _closest(name, options)
    return close and f"did you mean {close}=?"


def no_attribute(name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that the context does not have."""
    close = _closest(name, [each for each in names if not each.startswith("_")])
    meant = _ATTRIBUTES.get(name, f"ctx.{close}" if close else "")
    return AttributeError(f"ctx has no {name!r}" + (f": write {meant}" if meant else ""))


def _closest(name: str, names: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # Only needed for errors.

    return next(iter(get_close_matches(name, [*names], n=1, cutoff=0.7)), None)


def refused(known: Sequence[inspect.Parameter], what: str, fix: str | None) -> CallError:
    """Return the error for a call with wrong arguments; ``known`` are the parameters."""
    shapes: dict[object, str] = {inspect.Parameter.KEYWORD_ONLY: "{}=", inspect.Parameter.VAR_KEYWORD: "**{}"}
    typed = ", ".join(shapes.get(each.kind, "{}").format(each.name) for each in known)
    return CallError(what, why=f"its arguments: {typed}" if typed else "it takes no arguments", fix=fix)


def _name_of(function: Callable[..., object]) -> str:
    owner, _, method = function.__qualname__.rpartition(".")
    return f"{_NAMES.get(owner, 'allranks')}.{method}"


def _after_the_end(function: Callable[..., object]) -> RankError:
    what = f"{_name_of(function)}() was called after the context was closed"
    why = "the with block of allranks.init() has ended, and the ranks have left each other"
    return RankError(what, why=why, fix="move the call into the with block")


def _explained(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> CallError:
    name = _name_of(function)
    first = 1 if "." in function.__qualname__ else 0  # Skip the context, which the script does not pass.
    known, values = [*inspect.signature(function).parameters.values()][first:], args[first:]
    names = [each.name for each in known]
    places = [each for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]
    others = [word for word in kwargs if word not in names]
    fix = _BY_METHOD.get(name)
    if others and not any(each.kind is each.VAR_KEYWORD for each in known):
        fix = meant_by(others[0], names) or fix or "leave it out"
        return refused(known, f"{name}() has no argument {others[0]!r}", fix)
    if len(values) > len(places):
        extra = ", ".join(type(value).__name__ for value in values[len(places) :])
        option = next((each.name for each in known if each.kind is each.KEYWORD_ONLY), None)
        fix = fix or (f"name the options, as in {option}=..." if option else "leave it out")
        return refused(known, f"{name}() got more than it takes: {extra}", fix)
    absent = [each.name for each in known[len(values) :] if each.default is each.empty and each.name not in kwargs]
    return refused(known, f"{name}() got {'no ' + absent[0] if absent else 'a value twice'}", fix)


def is_whole(value: object, least: int | None) -> TypeGuard[int]:
    """Return True for an integer (not a bool) that is at least ``least``, if that is given."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def positive(name: str, value: object) -> int:
    """Return ``value`` if it is an integer greater than 0; raise otherwise."""
    if not is_whole(value, 1):
        raise RankError(f"invalid number of samples: {name}={value!r}", fix=f"give {name} as a whole number from 1 on")
    return value


def scale_factor(name: str, rule: object, ratio: float) -> float:
    """Return the factor for a learning rate if the batch grows by ``ratio``; ``name`` is the rule's argument."""
    if rule not in ("linear", "sqrt"):
        raise RankError(f"invalid rule for the learning rate: {name}={rule!r}", fix='give "linear" or "sqrt"')
    return ratio if rule == "linear" else math.sqrt(ratio)
