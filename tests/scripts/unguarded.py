"""AdamW that needs no ``torch._dynamo``."""

from __future__ import annotations

import torch


class AdamW(torch.optim.AdamW):
    """AdamW, which computes the same to the bit, and keeps the same state.

    torch's own optimizers import ``torch._dynamo`` when they are first used, which takes as long as torch itself. What
    ``__wrapped__`` has is the same method without the guard that does so.
    """

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    step = torch.no_grad()(torch.optim.AdamW.step.__wrapped__)
