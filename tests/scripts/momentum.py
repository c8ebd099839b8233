"""Steps with momentum that need no ``torch._dynamo``."""

from __future__ import annotations

import torch


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum.

    torch's own optimizers import ``torch._dynamo`` when they are first used, which takes as long as torch itself. What
    ``__wrapped__`` has is the same method without the guard that does so.
    """

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=group["lr"])
