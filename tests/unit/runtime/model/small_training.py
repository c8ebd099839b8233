"""A small model and its batches."""

from __future__ import annotations

import torch
from torch import nn


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(seed, n=4):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
