"""The parts of a checkpoint: the script's own by name, and those of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from allranks.errors import RankError
from allranks.runtime.model.wrappers import unwrap

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Names of what is saved besides the script's parts.
PROGRESS, SCALER, METRICS, RANDOM = "ctx.progress", "ctx.scaler", "ctx.metrics", "ctx.random"


class Part:
    """Something with ``state_dict`` and ``load_state_dict``.

    Args:
        name: what the script calls it.
        given: the object; a model may be wrapped for data parallelism or compiled.

    Attributes:
        kind: ``module``, ``optimizer`` or ``other``.
        held: the object without wrappers, so that keys do not depend on the number of ranks.
        replicated: whether it is a model that data parallelism keeps equal on all ranks.
    """

    def __init__(self, name: str, given: Any) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(given, method, None)):
                raise RankError(
                    f"ctx.checkpoints({name}=...): a {type(given).__name__} has no {method}()",
                    fix="give models, optimizers, schedulers, loaders, or objects of yours with both methods; "
                    "plain values go into config=",
                )
        self.name = name
        self.held: Any = _bare(given) if isinstance(given, nn.Module) else given
        self.replicated = isinstance(given, nn.Module) and unwrap(given) is not given
        if isinstance(given, nn.Module):
            self.kind = "module"
        else:
            self.kind = "optimizer" if hasattr(given, "param_groups") else "other"

    def parameters(self) -> list[nn.Parameter]:
        """Give the parameters of an optimizer, in the order of its state; of a model, its own."""
        if self.kind == "module":
            return list(self.held.parameters())
        if self.kind == "optimizer":
            return [parameter for group in self.held.param_groups for parameter in group["params"]]
        return []

    def shapes(self) -> list[list[int]] | None:
        """Give the shapes of the parameters of an optimizer, which its state does not tell."""
        return [list(parameter.shape) for parameter in self.parameters()] if self.kind == "optimizer" else None


def _bare(module: nn.Module) -> nn.Module:
    """Take away what ``ctx.prepare``, DistributedDataParallel and torch.compile put around a model."""
    while True:
        inner = unwrap(module)
        inner = getattr(inner, "_orig_mod", inner)
        if inner is module:
            return module
        module = inner


def of_script(given: dict[str, Any]) -> list[Part]:
    """Give the parts that the script named.

    Raises:
        RankError: one has no ``state_dict``, or there is none at all.
    """
    if not given:
        raise RankError("ctx.checkpoints() without anything to save", fix="name the parts: model=model, optimizer=...")
    return [Part(name, value) for name, value in given.items()]


def of_context(ctx: Context) -> list[Part]:
    """Give what the context itself has to keep: the number of steps, the scale of gradients, metrics."""
    found = [Part(PROGRESS, ctx.progress)]
    if ctx.precision == "fp16":
        found.append(Part(SCALER, ctx.scaler))
    metrics = getattr(ctx, "metrics", None)
    if callable(getattr(metrics, "state_dict", None)):
        found.append(Part(METRICS, metrics))
    return found


def shared_parameters(parts: list[Part]) -> set[int]:
    """Give the ids of the parameters that are equal on all ranks, because their gradients are averaged."""
    return {id(parameter) for part in parts if part.replicated for parameter in part.parameters()}
