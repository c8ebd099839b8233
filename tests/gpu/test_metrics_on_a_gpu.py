"""Metrics on a GPU: the host never waits for it between two readings."""

from __future__ import annotations

import json

import pytest
import torch

import allranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


@pytest.mark.parametrize("log_every", [1, 10])
def test_nothing_waits_for_the_gpu(tmp_path, monkeypatch, log_every):
    monkeypatch.setenv("ALLRANKS_RUN_DIR", str(tmp_path))
    with allranks.init(device="cuda", backend="nccl", log_every=log_every) as ctx:
        values = [torch.tensor(float(number), device=ctx.device, requires_grad=True) for number in range(1, 201)]
        weights = torch.full((200,), 2.0, device=ctx.device).unbind()
        ctx.metrics.log(loss=values[0], other=1.0)
        assert ctx.metrics.means() == {"loss": 1.0, "other": 1.0}
        ctx.metrics.log(loss=values[0], weight=0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number, value in enumerate(values):
                ctx.metrics.start_step()
                ctx.progress.step += 1
                ctx.metrics.log(loss=value, other=torch.ones((), device=ctx.device, dtype=torch.bfloat16))
                ctx.metrics.log(weighted=value, weight=weights[number])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ctx.metrics.means() == {"loss": 100.5, "other": 1.0, "weighted": 100.5}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(log_every, 201, log_every))
    assert lines[-1]["loss"] == 200.5 - log_every / 2
