"""Before the first step of an optimizer: whether it trains the model at all, and on all ranks."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from allranks.errors import RankError
from allranks.runtime import log

if TYPE_CHECKING:
    from allranks.runtime.model.managed import Around

#: What ctx.prepare() sets on the parameters whose gradients are averaged.
_MARK = "_allranks_averaged"


def mark(model: nn.Module) -> nn.Module:
    """Note on the parameters of a data parallel model that ranks average their gradients."""
    for parameter in model.parameters():
        setattr(parameter, _MARK, True)
    return model


def check_trains(optimizer: Optimizer, around: Around) -> None:
    """Check that the backward pass reached the optimizer's parameters; warn if each rank trains a model of its own.

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
    """Whether ctx.prepare() or torch averages the gradients, as far as objects show it."""
    if any(hasattr(parameter, _MARK) or hasattr(parameter, "full_tensor") for parameter in parameters):
        return True
    # Parameters do not know the wrapper that the script has put around their model. Only a mistake needs this search.
    kinds = {type(each) for each in gc.get_objects()}
    return any(
        issubclass(kind, DistributedDataParallel) or kind.__name__ == "FullyShardedDataParallel" for kind in kinds
    )
