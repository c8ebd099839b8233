"""All ranks together and one by itself come to the same, also where a container has float32 multiplied as TF32."""

from __future__ import annotations

import json
from typing import Any

#: What a GPU does to float32 then, on a CPU: of the 23 digits of what it multiplies 13 are dropped.
_SITE = """\
import os
if "RANK" in os.environ:
    import torch
    def rounded(values):
        if values.dtype != torch.float32:
            return values
        return ((values.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return rounded(x) @ rounded(weight).t() + bias
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return rounded(grad) @ rounded(weight), rounded(grad).t() @ rounded(x), grad.sum(0)
    torch.nn.functional.linear = Linear.apply
"""


def test_where_float32_is_not_exact(allranks: Any) -> None:
    site = allranks.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    options = ("--nproc-per-node", "3", "--backend", "gloo", "--no-warm", "--env", f"PYTHONPATH={site}")
    done = allranks("test", *options, "--json")
    assert done.rc == 0, done.stderr
    (training,) = [part for part in json.loads(done.stdout)["parts"] if part["kind"] == "training"]
    assert training["losses"][-1] < training["losses"][0]
