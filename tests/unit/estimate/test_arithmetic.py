"""Memory, traffic and batches that an estimate computes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.estimate.arithmetic import CONTEXT_BYTES, GIB, Needs, from_numbers, rows, smallest_gpu
from allranks.estimate.network import NETWORKS, Network, interpolated
from allranks.record.estimate import SHARED_MEMORY

NEEDS = Needs(
    count=1000,
    parameters=4000,
    gradients=4000,
    optimizer_state=8000,
    activations=6400,
    sent=4000,
    gathered=4000,
    units=(1200, 1200, 1200),
    root=400,
    checkpoint=12000,
    messages=(1000, 3000),
    messages_of_cpus=(4000,),
    shared=4000,
    buffers=40,
    temporaries=100,
    batch=16,
    global_batch=64,
)


def test_with_ddp_each_rank_holds_all_of_the_model_and_its_part_of_the_activations() -> None:
    assert NEEDS.memory("ddp", 4) == 4000 + 4000 + 8000 + 40 + 6400
    assert NEEDS.memory("ddp", 8) == 4000 + 4000 + 8000 + 40 + 3200


def test_with_fsdp_each_rank_holds_a_part_of_the_model_and_what_is_gathered() -> None:
    assert NEEDS.memory("fsdp", 4) == 16000 / 4 + 400 + 1200 + 1200 + 40 + 6400


def test_one_rank_shards_nothing() -> None:
    alone = replace(NEEDS, batch=64)
    assert alone.memory("fsdp", 1) == alone.memory("ddp", 1) == 4000 + 4000 + 8000 + 40 + 6400


def test_activations_of_a_batch_per_rank_do_not_change_with_the_ranks() -> None:
    needs = replace(NEEDS, global_batch=None)
    assert needs.memory("ddp", 2) == needs.memory("ddp", 64)
    assert needs.effective_batch(64) == 16 * 64


def test_temporaries_of_the_optimizer_count_where_they_are_more_than_the_activations() -> None:
    assert replace(NEEDS, temporaries=9000).memory("ddp", 4) == 4000 + 4000 + 8000 + 40 + 9000


@pytest.mark.parametrize(("ranks", "ddp", "fsdp"), [(1, 0, 0), (2, 4000, 5800), (4, 6000, 8700)])
def test_bytes_that_a_rank_sends(ranks: int, ddp: int, fsdp: int) -> None:
    """Parts of (n - 1) / n: the gradients, twice; all that is gathered, twice but for the root, and the gradients."""
    assert (NEEDS.sends("ddp", ranks), NEEDS.sends("fsdp", ranks)) == (ddp, fsdp)


def test_micro_batches_gather_again_and_average_once() -> None:
    needs = replace(NEEDS, accumulation=3)
    assert (needs.sends("ddp", 2), needs.sends("fsdp", 2)) == (4000, 7600 * 3 / 2 + 2000)
    assert needs.effective_batch(2) == 192


@pytest.mark.parametrize(
    ("dtype", "optimizer", "parameters", "state"),
    [
        ("fp32", "adamw", 4, 8),
        ("bf16", "adamw", 2, 4),
        ("bf16", "adamw-fp32", 2, 12),  # arXiv:1910.02054: 16 bytes of a parameter with its gradient.
        ("bf16", "adamw-8bit", 2, 2),
        ("fp32", "momentum", 4, 4),
        ("fp32", "sgd", 4, 0),
    ],
)
def test_bytes_of_a_parameter(dtype: str, optimizer: str, parameters: int, state: int) -> None:
    needs = from_numbers(10**9, dtype, optimizer, None)
    assert (needs.parameters, needs.gradients, needs.optimizer_state) == (
        parameters * 10**9,
        parameters * 10**9,
        state * 10**9,
    )
    assert needs.memory("ddp", 8) is None  # Activations are unknown.
    assert needs.checkpoint == (parameters + state) * 10**9


def test_rows_take_the_network_of_their_place() -> None:
    needs = from_numbers(10**9, "fp32", "adamw", 0)
    within, between = NETWORKS["NVLink4"], NETWORKS["100GbE"]
    found = rows(needs, [1, 2], 8, [between, within])
    assert [(row.nodes, row.strategy, row.network) for row in found] == [
        (1, "ddp", "NVLink4"),
        (1, "fsdp", "NVLink4"),
        (2, "ddp", "100GbE"),
        (2, "fsdp", "100GbE"),
    ]
    assert found[2].sends == 2 * 15 * 4 * 10**9 // 16
    assert found[2].seconds == found[2].sends / 12.5e9


def test_a_row_without_a_network_has_no_time_and_one_rank_needs_none() -> None:
    assert [row.seconds for row in rows(NEEDS, [1, 2], 1, [])] == [0.0, None, None]


def test_a_batch_that_does_not_divide_is_marked() -> None:
    assert [row.divides for row in rows(NEEDS, [1, 3], 1, [])] == [True, False, False]


def test_the_smallest_gpu_leaves_room_for_the_context() -> None:
    assert smallest_gpu(24 * GIB - CONTEXT_BYTES) == 24
    assert smallest_gpu(24 * GIB - CONTEXT_BYTES + 1) == 32
    assert smallest_gpu(1000 * GIB) is None


def test_a_network_that_is_named_counts_before_a_rate_for_any_place() -> None:
    rate = Network("12.5GB/s", 12.5e9, "both")
    for networks in ([rate, NETWORKS["NVLink4"]], [NETWORKS["NVLink4"], rate]):
        found = {(row.nodes, row.network) for row in rows(NEEDS, [1, 2], 4, networks)}
        assert found == {(1, "NVLink4"), (2, "12.5GB/s")}


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 0.5), (10, 0.5), (100, 1.0), (1000, 2.0), (31.6227766, 0.5 * 2**0.5), (2000, 4.0)],
)
def test_seconds_between_measured_sizes_follow_a_power_law(size: float, expected: float) -> None:
    """Below the smallest they stay, above the largest they grow with the size."""
    assert interpolated([(10, 0.5), (100, 1.0), (1000, 2.0)], size) == pytest.approx(expected)


def test_time_is_the_sum_of_the_messages_of_a_step() -> None:
    """Of 2 ranks: DDP sends each message once, FSDP gathers half of its parts twice and of the root once."""
    curves = {
        "all_reduce": [(1000, 1.0), (3000, 2.0), (4000, 7.0)],
        "all_gather": [(200, 10.0), (600, 20.0)],
        "reduce_scatter": [(200, 100.0), (600, 200.0)],
        SHARED_MEMORY: [(4000, 5.0)],
    }
    on_gpus, on_cpus = (
        Network("gpus", 1.0, "both", curves, on_cpus=False),
        Network("cpus", 1.0, "between", curves, True),
    )
    fsdp = 10 + 6 * 20 + 100 + 3 * 200
    without_memory = {name: curve for name, curve in curves.items() if name != SHARED_MEMORY}
    assert [row.seconds for row in rows(replace(NEEDS, shared=0), [1], 2, [on_gpus])] == [1.0 + 2.0, fsdp]
    assert [row.seconds for row in rows(NEEDS, [2], 1, [on_cpus])] == [7.0, fsdp]
    within = replace(on_cpus, place="within")
    assert [(row.seconds, row.is_shared) for row in rows(NEEDS, [1], 2, [within])] == [(5.0, True), (fsdp, False)]
    (alone, _) = rows(NEEDS, [1], 2, [replace(within, curves=without_memory)])
    assert (alone.seconds, alone.is_shared) == (7.0, False)


def test_messages_add_up_to_what_is_sent() -> None:
    rate = Network("1 byte per second", 1.0, "both")
    for row in rows(replace(NEEDS, accumulation=3), [1, 4], 2, [rate]):
        assert row.seconds == row.sends


def test_the_largest_model_takes_no_more_memory_here_than_a_small_one() -> None:
    assert from_numbers(10**14, "fp32", "adamw", None).messages == (4 * 10**14,)
