"""deterministic=True: the same bits, what is said of it, and the settings put back."""

from __future__ import annotations

import os

import pytest
import torch

from allranks.runtime.seed import make_deterministic

SCRIPT = """
import os, torch, allranks
with allranks.init(seed=3, deterministic=True) as ctx:
    assert ctx.deterministic and torch.are_deterministic_algorithms_enabled()
    model = ctx.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)))
    optimizer = ctx.optimizer(torch.optim.Adam, model, lr=0.1)
    for _ in range(5):
        ctx.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    print([value.numpy().tobytes().hex() for value in model.state_dict().values()])
print(torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


def test_two_runs_are_equal_to_the_bit(run_ranks):
    first, second = run_ranks(SCRIPT), run_ranks(SCRIPT)
    assert [code for code, _, _ in first + second] == [0] * 4
    assert [out for _, out, _ in first] == [out for _, out, _ in second]
    assert first[0][1] == first[1][1]
    assert first[0][1].endswith("False None\n")
    (_, _, told), (_, _, silent) = first
    assert "allranks: deterministic: with the same script, data, seed, number of ranks, hardware" in told
    assert "PYTHONHASHSEED is not set" in told
    assert silent == ""


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_the_settings_are_put_back(monkeypatch, capsys, given):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if given:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    before = settings()
    put_back = make_deterministic(report=True, seeded=False)
    assert settings() == (True, False, True, False, True, given or ":4096:8")
    put_back()
    assert settings() == before
    err = capsys.readouterr().err
    assert "seed=None leaves the generators alone" in err
    assert "PYTHONHASHSEED" not in err


def test_an_operation_that_torch_cannot_make_deterministic_is_an_error():
    put_back = make_deterministic(report=False, seeded=True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.empty(10).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    finally:
        put_back()
