"""Computing in bf16 or fp16, and scaling gradients that fp16 would round to zero."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING: AbstractContextManager[Any] = nullcontext()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Give a block in which torch computes in ``precision`` where that is safe."""
    if precision == "fp32":
        return _NOTHING
    return torch.autocast(device.type, DTYPES[precision])


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler that adapts the scale itself, once all optimizers of a backward pass have made their steps.

    Several optimizers may share one backward pass: the scale changes only when the next loss is scaled, or when
    the state is saved.
    """

    due = False

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale."""
        self._adapt()
        return super().scale(outputs)

    def state_dict(self) -> dict[str, Any]:
        """Give scale and counters, as the next step will see them."""
        self._adapt()
        return super().state_dict()

    def _adapt(self) -> None:
        if self.due:
            self.due = False
            self.update()

    def unscale_on_all_ranks(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of a sharded model by the scale; an overflow in one rank's part counts for all."""
        from torch import distributed

        self.unscale_(optimizer)
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, overflow in found.items():
            local = overflow.to_local() if hasattr(overflow, "to_local") else overflow
            distributed.all_reduce(local, distributed.ReduceOp.MAX)
            found[device] = local
