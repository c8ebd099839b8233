"""What only a node knows is put into the orders that all nodes share, or it is said what is missing."""

from __future__ import annotations

import pytest

from allranks import contract
from allranks.agent.main import placed
from allranks.errors import LaunchError
from node_orders import NODE

SPEC = NODE._replace(nnodes=4, args=("-x",))
PLACE = {
    contract.ATTEMPT: "3",
    contract.NODE_RANK: "2",
    contract.NODE_COUNT: "3",
    contract.NODE_NPROC: "8",
    contract.RDZV_HOST: "gpu01",
    contract.RDZV_PORT: "20123",
}


def test_a_node_that_was_told_its_place():
    spec = placed(SPEC, PLACE)
    assert (spec.attempt, spec.node, spec.nnodes, spec.nproc_per_node) == (3, 2, 3, 8)
    assert spec.run_dir == "/runs/run"
    assert placed(SPEC, {**PLACE, contract.RUN_DIR: "/runs/run/task-7"}).run_dir == "/runs/run/task-7"
    assert (spec.master_addr, spec.master_port, spec.args, spec.min_nodes) == ("gpu01", 20123, ("-x",), 1)


def test_a_node_alone_lets_its_ranks_meet_where_the_orders_say():
    spec = placed(SPEC, {**PLACE, contract.NODE_RANK: "0", contract.NODE_COUNT: "1"})
    assert (spec.nnodes, spec.nproc_per_node, spec.master_addr, spec.master_port) == (1, 8, "127.0.0.1", None)


def test_a_machine_of_its_own_is_told_nothing():
    assert placed(SPEC, {contract.ATTEMPT: "5", "SLURM_NODEID": "1"}) == SPEC


@pytest.mark.parametrize("name", PLACE)
def test_a_missing_variable_is_named(name):
    with pytest.raises(LaunchError) as caught:
        placed(SPEC, {other: value for other, value in PLACE.items() if other != name})
    assert caught.value.what.endswith(f": invalid node environment: {name} not set")
    assert caught.value.why == "5 of 6 are"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        (contract.NODE_RANK, "one", "ALLRANKS_NODE_RANK=one (expected a number from 0 to 2)"),
        (contract.NODE_RANK, "3", "ALLRANKS_NODE_RANK=3 (expected a number from 0 to 2)"),
        (contract.NODE_RANK, "-1", "ALLRANKS_NODE_RANK=-1 (expected a number from 0 to 2)"),
        (contract.NODE_NPROC, "0", "ALLRANKS_NODE_NPROC=0 (expected a number of 1 or more)"),
        (contract.RDZV_PORT, "70000", "ALLRANKS_RDZV_PORT=70000 (expected a number from 1 to 65535)"),
    ],
)
def test_an_invalid_value_is_named(name, value, what):
    with pytest.raises(LaunchError) as caught:
        placed(SPEC, {**PLACE, name: value})
    assert caught.value.what.endswith(f": invalid node environment: {what}")


def test_too_few_nodes_are_said():
    with pytest.raises(LaunchError) as caught:
        placed(SPEC._replace(min_nodes=4), PLACE)
    assert caught.value.what == "3 of at least 4 nodes are here"
