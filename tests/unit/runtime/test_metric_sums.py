"""Weighted sums of metrics, as they are kept for a GPU; the same operations, on tensors of the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks import RankError
from allranks.runtime.metrics.sums import Sums, means, merge, pack

CPU = torch.device("cpu")


def held(values, weights):
    sums = Sums()
    for value, weight in zip(values, weights, strict=True):
        sums.hold(value, weight)
    return sums


def total_of(sums):
    return pack({"x": sums}, ["x"], CPU).tolist()[0]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 512)), max_size=200))
def test_what_is_held_adds_up_as_what_is_added_at_once(entries):
    sums = held([torch.tensor(value) for value, _ in entries], [weight for _, weight in entries])
    total, weight = total_of(sums)
    assert weight == sum(weight for _, weight in entries)
    assert total == pytest.approx(math.fsum(value * weight for value, weight in entries), rel=1e-9, abs=1e-3)


def test_a_weight_of_nothing_counts_for_nothing_even_with_nan():
    weights = [torch.tensor(0.0), torch.tensor(3.0), 2]
    assert total_of(held([torch.tensor(math.nan), torch.tensor(5.0), torch.tensor(1.0)], weights)) == [17.0, 5.0]


def test_bf16_is_added_up_in_double_precision():
    sums = held([torch.tensor(1.0, dtype=torch.bfloat16)] * 1000, [1] * 1000)
    assert total_of(sums) == [1000.0, 1000.0]


def test_types_can_be_mixed_and_gradients_are_dropped():
    values = [torch.tensor(2.0, requires_grad=True), torch.tensor(3), torch.tensor(True), torch.tensor([4.0])]
    sums = held(values, [1] * 4)
    assert total_of(sums) == [10.0, 4.0]
    assert not sums.part().requires_grad


def test_a_tensor_that_is_changed_after_logging_is_an_error():
    value = torch.tensor(1.0)
    sums = held([value], [1])
    value += 1
    with pytest.raises(RankError, match="written to after it had been logged"):
        sums.fold()


def test_a_view_or_an_inference_tensor_is_copied():
    many = torch.arange(8.0)
    with torch.inference_mode():
        inferred = torch.tensor(7.0)
    sums = held([many[3], inferred], [1, 1])
    many += 1
    assert total_of(sums) == [10.0, 2.0]


def test_a_view_keeps_nothing_of_what_it_is_a_view_of():
    sums = held([torch.zeros(1 << 20)[5]], [1])
    assert sums._held[0][0].untyped_storage().nbytes() == 4


def test_rows_in_the_order_of_the_names_and_a_mark_for_others():
    sums = {"a": Sums(2.0, 1.0), "b": held([torch.tensor(6.0)], [2])}
    assert pack(sums, ["b", "c", "a"], CPU).tolist() == [[12, 2], [0, 0], [2, 1], [0, 0]]
    assert pack(sums, ["b"], CPU).tolist() == [[12, 2], [1, 0]]
    assert pack({}, [], CPU).tolist() == [[0, 0]]


def test_means_of_what_was_logged():
    assert means(["a", "b"], [[6.0, 3.0], [0.0, 0.0]]) == {"a": 2.0}


def test_merge_adds():
    sums = {"a": Sums(1.0, 1.0)}
    merge(sums, {"a": held([torch.tensor(2.0)], [1]), "b": Sums(4.0, 2.0)})
    assert pack(sums, ["a", "b"], CPU).tolist()[:2] == [[3, 2], [4, 2]]
