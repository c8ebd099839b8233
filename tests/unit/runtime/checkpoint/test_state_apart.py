"""Taking states apart and putting them together again."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RankError
from allranks.runtime.checkpoint.state import join, names_in, split

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
KEYS = st.one_of(st.text(max_size=3), st.integers(0, 9))
TENSORS = st.integers(0, 1000).map(torch.tensor)
STATES = st.recursive(
    LEAVES | TENSORS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(STATES)
def test_a_state_comes_back_as_it_was(state):
    skeleton, tensors = split("part", state)
    box = io.BytesIO()
    torch.save(skeleton, box)
    box.seek(0)
    read = torch.load(box, weights_only=True)
    assert set(names_in(read)) == set(tensors)
    assert same(join(read, tensors.__getitem__), state)


def test_names_are_the_keys_that_lead_to_a_tensor():
    tensor = torch.ones(2)
    _, tensors = split("optimizer", {"state": {0: {"exp_avg": tensor}}, "list": [1, tensor]})
    assert list(tensors) == ["optimizer/state/0/exp_avg", "optimizer/list/1"]


def test_keys_that_look_alike_do_not_meet():
    skeleton, tensors = split("p", {1: torch.ones(1), "1": torch.zeros(1)})
    assert join(skeleton, tensors.__getitem__) == {1: torch.ones(1), "1": torch.zeros(1)}


def test_versions_of_modules_are_kept():
    state = torch.nn.BatchNorm1d(3).state_dict()
    skeleton, tensors = split("model", state)
    back = join(skeleton, tensors.__getitem__)
    assert isinstance(back, OrderedDict)
    assert back._metadata == state._metadata


def test_numbers_of_numpy_become_plain():
    assert split("p", {"loss": numpy.float64(0.5), "n": numpy.int32(3)})[0] == {"loss": 0.5, "n": 3}


def test_sparse_tensors_stay_in_the_objects():
    skeleton, tensors = split("p", {"s": torch.eye(2).to_sparse()})
    assert not tensors
    assert torch.equal(skeleton["s"].to_dense(), torch.eye(2))


@pytest.mark.parametrize("value", [object(), lambda: 0, numpy.ones(2), {"f": {1, print}}])
def test_what_is_not_plain_is_named(value):
    with pytest.raises(RankError, match=r"the state of scheduler\.deep\.0.* cannot be saved"):
        split("scheduler", {"deep": [value]})


def test_a_key_that_is_not_plain_is_refused():
    with pytest.raises(RankError, match="cannot be saved"):
        split("p", {object(): 1})


def test_a_tensor_without_data_is_refused():
    with pytest.raises(RankError, match="meta"):
        split("p", {"w": torch.empty(2, device="meta")})


def schedulers(optimizer):
    from torch.optim import lr_scheduler as lr

    def chain(*made):
        return lr.SequentialLR(optimizer, list(made), milestones=[2])

    yield "LambdaLR", lambda: lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    yield "MultiplicativeLR", lambda: lr.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    yield "StepLR", lambda: lr.StepLR(optimizer, 2)
    yield "MultiStepLR", lambda: lr.MultiStepLR(optimizer, [2, 4, 4])
    yield "ConstantLR", lambda: lr.ConstantLR(optimizer, total_iters=4)
    yield "LinearLR", lambda: lr.LinearLR(optimizer, total_iters=4)
    yield "ExponentialLR", lambda: lr.ExponentialLR(optimizer, 0.9)
    yield "PolynomialLR", lambda: lr.PolynomialLR(optimizer, 5)
    yield "CosineAnnealingLR", lambda: lr.CosineAnnealingLR(optimizer, 5)
    yield "CosineAnnealingWarmRestarts", lambda: lr.CosineAnnealingWarmRestarts(optimizer, 3)
    yield "CyclicLR", lambda: lr.CyclicLR(optimizer, 0.1, 1.0, step_size_up=2)
    yield "OneCycleLR", lambda: lr.OneCycleLR(optimizer, 1.0, total_steps=20)
    yield "ReduceLROnPlateau", lambda: lr.ReduceLROnPlateau(optimizer, patience=1)
    yield "Chained", lambda: lr.ChainedScheduler([lr.MultiStepLR(optimizer, [4]), lr.ExponentialLR(optimizer, 0.9)])
    yield "Sequential", lambda: chain(lr.LinearLR(optimizer, total_iters=2), lr.MultiStepLR(optimizer, [1, 3]))


def made_scheduler(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    return optimizer, dict(schedulers(optimizer))[name]()


def rates(optimizer, scheduler, count):
    found = []
    for _ in range(count):
        optimizer.step()
        scheduler.step(*([1.0] if type(scheduler).__name__ == "ReduceLROnPlateau" else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("name", [name for name, _ in schedulers(None)])
def test_schedulers_go_on_as_they_would_have(name):
    optimizer, scheduler = made_scheduler(name)
    rates(optimizer, scheduler, 3)
    skeleton, tensors = split("p", {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    box = io.BytesIO()
    torch.save(skeleton, box)
    box.seek(0)
    state = join(torch.load(box, weights_only=True), tensors.__getitem__)
    optimizer_after, after = made_scheduler(name)
    optimizer_after.load_state_dict(state["optimizer"])
    after.load_state_dict(state["scheduler"])
    assert rates(optimizer_after, after, 5) == rates(optimizer, scheduler, 5)


def test_counters_stay_counters():
    skeleton, tensors = split("p", {"milestones": Counter([3, 3, 5])})
    back = join(skeleton, tensors.__getitem__)["milestones"]
    assert type(back) is Counter
    assert back == {3: 2, 5: 1}
