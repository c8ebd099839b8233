"""What node 0's agent decides for all nodes, with agents that are played by hand over real connections."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meetings import orders

from allranks import contract
from allranks.agent.nodes import coordinator as coordinator_module
from allranks.agent.nodes.coordinator import filled, not_started


def test_nodes_that_come_in_any_order_are_numbered_as_the_scheduler_did(meet):
    meeting = meet(orders())
    agents = [*meeting.ready(2), *meeting.ready(0), *meeting.ready(1, ranks=4)]
    for agent in agents:
        told = agent.hear("generation")
        assert told["nodes"] == [[0, "host0", 2], [1, "host1", 4], [2, "host2", 2]]
        assert (told["number"], told["address"], told["port"]) == (0, "127.0.0.1", 1001)
    assert meeting.addresses == ["127.0.0.1"]  # All come to node 0 there, so the ranks' store listens nowhere else.


def test_nodes_with_different_versions_of_torch_do_not_begin(meet):
    meeting = meet(orders(2))
    agents = [*meeting.ready(0), *meeting.ready(1, torch="2.12.1")]
    for agent in agents:
        outcome = agent.hear("outcome")
        told = (outcome["state"], outcome["reason"], outcome["lost"])
        versions = f"it has torch 2.12.1, and node 0 ({socket.gethostname()}) has torch 2.13.0"
        assert told == ("FAILED", f"node 1 (host1) was rejected: {versions}", [])


def test_a_node_with_another_torch_is_left_out_where_it_is_not_needed(meet):
    meeting = meet(orders(3, min_nodes=2))
    agents = meeting.ready(0, 1)
    (other,) = meeting.ready(2, torch="2.12.1")
    assert other.hear("outcome")["state"] == "FAILED"
    for agent in agents:
        assert agent.hear("generation")["nodes"] == [[0, "host0", 2], [1, "host1", 2]]


@pytest.mark.parametrize("versions", [("2.13.0", None, None), (None, "2.13.0", None), (None, "2.13.0", "2.12.1")])
def test_nodes_without_torch_begin_beside_those_that_have_it(meet, versions):
    """Their ranks need none: the agents of others whose ranks need it end by themselves."""
    meeting = meet(orders(3), torch=versions[0])
    agents = [agent for node, torch in enumerate(versions) for agent in meeting.ready(node, torch=torch)]
    for agent in agents:
        assert len(agent.hear("generation")["nodes"]) == 3


def test_the_earliest_failure_is_blamed_whatever_the_clocks_say(meet):
    """Node 1's clock is an hour ahead, node 2's is behind. Node 1 failed first, and says so last."""
    meeting = meet(orders())
    agents = [*meeting.ready(0), *meeting.ready(1, behind=-3600.0), *meeting.ready(2, behind=3600.0)]
    for agent in agents:
        agent.hear("generation")
    now = time.time()
    agents[2].say("failed", rank=4, code=1, at=now - 3600.0 - 0.5)
    agents[0].say("failed", rank=0, code=1, at=now - 0.4)
    agents[1].hear("end-ranks")
    agents[1].say("failed", rank=3, code=-9, at=now + 3600.0 - 0.9)
    end(*agents, cut=True)
    for agent in agents:
        outcome = agent.hear("outcome")
        assert (outcome["rank"], outcome["exit_code"]) == (3, 137)
        assert outcome["reason"] == "rank 3 on host1 was killed by SIGKILL"


def test_one_failure_is_followed_by_one_restart_of_all(meet):
    meeting = meet(orders(2, max_restarts=1))
    agents = meeting.ready(0, 1)
    for restart in (1, 2):
        for agent in agents:
            assert agent.hear("generation")["number"] == restart - 1
        agents[0].say("failed", rank=1, code=3, at=time.time())
        agents[1].hear("end-ranks")
        end(*agents, cut=True)
        if restart == 1:
            again = [agent.hear("again") for agent in agents]
            assert [(told["restart"], told["rank"], told["counted"]) for told in again] == [(1, 1, True)] * 2
            for agent in agents:
                agent.say("ready")
    assert agents[1].hear("outcome")["exit_code"] == 3
    assert meeting.stores == 2


def test_a_node_that_has_done_its_part_may_go(meet):
    meeting = meet(orders(2))
    first, second = meeting.ready(0, 1)
    first.hear("generation")
    end(second)
    second.socket.close()
    assert first.hear("lost")["node"] == 1
    first.say("over", cut=False, **{"continue": True})
    assert first.hear("outcome")["state"] == "PREEMPTED"


def test_a_node_that_leaves_before_there_are_ranks_is_not_waited_for(meet):
    meeting = meet(orders())
    first, second = meeting.ready(0, 1)
    first.hear("welcome")
    second.say("leaving", why="no room")
    second.socket.close()
    outcome = first.hear("outcome")
    assert outcome["reason"] == "node 1 (host1) was lost: no room (2 of 3 nodes left, 3 needed)"
    assert outcome["lost"] == ["node 1 (host1)"]


def test_enough_nodes_begin_after_the_last_call_and_too_few_never(meet, monkeypatch):
    monkeypatch.setattr(coordinator_module, "LAST_CALL_SECONDS", 0.3)
    meeting = meet(orders(4, min_nodes=2))
    began = time.monotonic()
    first, _ = meeting.ready(0, 2)
    assert first.hear("generation")["nodes"] == [[0, "host0", 2], [2, "host2", 2]]
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(coordinator_module, "JOIN_SECONDS", 0.5)
    alone = meet(orders(4, min_nodes=2))
    (first,) = alone.ready(0)
    assert first.hear("outcome")["reason"] == "nodes 1, 2, 3 did not come within 0.5 s"


def test_who_does_not_belong_there_is_turned_away(meet):
    meeting = meet(orders(2))
    (first,) = meeting.ready(0)
    first.hear("welcome")
    why = "the agent there belongs to attempt 2, and this one to 1"
    assert meeting.agent(1, attempt=1).hear("refused")["why"] == why
    assert meeting.agent(0).hear("refused")["why"] == "node 0 (host0) is there already"
    assert meeting.agent(2).hear("refused")["why"] == "the agent there expects 2 nodes"
    (second,) = meeting.ready(1)
    second.hear("generation")
    assert meet(orders(1)).agent(1).hear("refused")["why"] == "the agent there expects 1 node"


def end(*agents, cut=False):
    """Have agents report that no rank of theirs is left."""
    for agent in agents:
        agent.say("over", cut=cut, **{"continue": False})


def with_spares(nodes, spares, **fields):
    return orders(nodes + spares, **{"spares": spares, "min_nodes": nodes, **fields})


def generation(agents):
    """Wait until these agents are told of a generation, and return its nodes in the order of their ranks."""
    (told,) = {tuple(node for node, _, _ in agent.hear("generation")["nodes"]) for agent in agents}
    return [*told]


def end_all(agents, restart):
    """Have agents end their ranks, as they are told to, and be ready again; no restart is counted."""
    for agent in agents:
        agent.hear("end-ranks")
        agent.say("over", cut=True, **{"continue": False})
    for agent in agents:
        told = agent.hear("again")
        assert (told["restart"], told["rank"], told["counted"]) == (restart, None, False)
        agent.say("ready")


def test_spares_wait_and_leave_with_the_others(meet):
    meeting = meet(with_spares(2, 2))
    spares = meeting.ready(3, 2)
    agents = meeting.ready(1, 0)
    assert generation(agents) == [0, 1]
    end(*agents)
    for agent in (*agents, *spares):
        assert agent.hear("outcome")["state"] == "SUCCEEDED"
    heard = {message["kind"] for agent in spares for message in agent.heard}
    assert heard == {"welcome"}  # No generation, and nothing of how the ranks ended.


def test_a_spare_takes_the_place_of_a_lost_node_without_a_restart_that_counts(meet):
    meeting = meet(with_spares(3, 2))
    first, second, third, *spares = meeting.ready(0, 1, 2, 3, 4)
    assert generation([first, second, third]) == [0, 1, 2]
    second.socket.close()
    lost = first.hear("lost")
    assert (lost["node"], lost["goes_on"]) == (1, True)
    end_all([first, third], 1)
    assert generation([first, third, spares[0]]) == [0, 3, 2]
    third.socket.close()
    end_all([first, spares[0]], 2)
    assert generation([first, *spares]) == [0, 3, 4]
    spares[0].socket.close()
    assert [first.hear("lost")["goes_on"] for _ in range(2)] == [True, False]
    for agent in (first, spares[1]):
        agent.hear("end-ranks")
        agent.say("over", cut=True, **{"continue": False})
    outcome = first.hear("outcome")
    assert outcome["state"] == "FAILED"
    assert outcome["reason"].endswith("node 3 (host3) was lost: its agent is gone (2 of 5 nodes left, 3 needed)")


def test_the_loss_of_a_spare_is_told_and_ends_nothing(meet):
    meeting = meet(with_spares(2, 1))
    first, second, spare = meeting.ready(0, 1, 2)
    assert generation([first, second]) == [0, 1]
    spare.say("leaving", why="it was to end")
    spare.socket.close()
    lost = second.hear("lost")
    assert (lost["node"], lost["why"], lost["goes_on"]) == (2, "it was to end", True)
    end(first, second)
    assert first.hear("outcome")["state"] == "SUCCEEDED"
    assert not [message for message in second.heard if message["kind"] == "end-ranks"]


def test_a_spare_that_comes_back_or_late_waits(meet):
    """There is no room for it: the ranks that run are not disturbed, as they are where a place is free."""
    meeting = meet(with_spares(2, 1))
    first, second = meeting.ready(0, 1)
    assert generation([first, second]) == [0, 1]
    (spare,) = meeting.ready(2)
    spare.hear("welcome")
    end(first, second)
    assert second.hear("outcome")["state"] == "SUCCEEDED"
    assert [message["kind"] for message in second.heard] == ["welcome"]


def test_a_spare_that_comes_when_the_job_has_ended_is_told_how(meet):
    meeting = meet(with_spares(2, 1))
    agents = meeting.ready(0, 1)
    assert generation(agents) == [0, 1]
    end(*agents)
    assert agents[0].hear("outcome")["state"] == "SUCCEEDED"
    late = meeting.agent(2)
    assert late.hear("welcome")["host"] == socket.gethostname()
    assert late.hear("outcome")["state"] == "SUCCEEDED"


def test_who_could_not_be_started_is_not_waited_for(meet, monkeypatch):
    monkeypatch.setattr(coordinator_module, "LAST_CALL_SECONDS", 600)
    absent = {1: ("node 1 (host1)", "ssh: no route to host")}
    for spares, expected in ((0, [0, 2]), (1, [0, 3, 2])):
        meeting = meet(with_spares(3, spares, min_nodes=2))
        monkeypatch.setattr(coordinator_module, "not_started", lambda node: absent)
        agents = meeting.ready(*expected)
        assert generation(agents) == expected


def test_the_others_hear_of_a_node_that_is_turned_away(meet):
    """So that its own end does not count as that of the run."""
    meeting = meet(orders(3, min_nodes=2))
    agents = meeting.ready(0, 1)
    agents[0].hear("welcome")
    (other,) = meeting.ready(2, torch="1.0")
    assert other.hear("outcome")["state"] == "FAILED"
    lost = agents[0].hear("lost")
    assert (lost["node"], lost["why"]) == (2, f"it has torch 1.0, and node 0 ({socket.gethostname()}) has torch 2.13.0")
    assert generation(agents) == [0, 1]


def test_too_few_are_left_when_most_could_not_be_started(meet, monkeypatch):
    meeting = meet(orders(3, min_nodes=2))
    absent = {1: ("node 1 (host1)", "no route"), 2: ("node 2 (host2)", "no key")}
    monkeypatch.setattr(coordinator_module, "not_started", lambda node: absent)
    (first,) = meeting.ready(0)
    why = "node 1 (host1) was lost: no route; node 2 (host2) was lost: no key (1 of 3 nodes left, 2 needed)"
    assert first.hear("outcome")["reason"] == why


def test_all_hear_whom_they_wait_for(meet, monkeypatch):
    monkeypatch.setattr(contract, "MISSING_SECONDS", 600.0)
    meeting = meet(orders(4))
    first, second = meeting.ready(0, 2)
    for agent in (first, second):
        agent.hear("welcome")
    monkeypatch.setattr(meeting.coordinator, "_reports_missing_at", 0.0)  # The seconds are over now, and not before.
    assert [agent.hear("missing")["nodes"] for agent in (first, second)] == [[1, 3], [1, 3]]
    monkeypatch.setattr(meeting.coordinator, "_reports_missing_at", 0.0)
    meeting.ready(1)
    assert first.hear("missing")["nodes"] == [3]
    meeting.ready(3)
    assert first.hear("generation")["number"] == 0
    assert [message["kind"] for message in first.heard if message["kind"] == "missing"] == []


# --- places in the order of ranks: who keeps one, and who takes that of a node that is lost ---


@pytest.mark.parametrize(
    ("places", "ready", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2]),
        ([0, 1, 2], [0, 2, 3, 4], [0, 3, 2]),
        ([0, 1, 2], [0, 4, 3], [0, 3, 4]),
        ([0, 1, 2], [0, 2], [0, 1, 2]),
        ([0, 3, 2], [0, 1, 2], [0, 1, 2]),
    ],
)
def test_spares_fill_places(places, ready, expected):
    assert filled(places, ready) == expected


@given(st.permutations(range(6)), st.integers(1, 6), st.sets(st.integers(0, 5)))
def test_who_is_ready_keeps_its_place_and_no_spare_waits_while_one_is_free(nodes, count, ready):
    places = nodes[:count]
    found = filled(places, ready)
    assert len(found) == len({*found}) == count
    assert all(now == before for before, now in zip(places, found, strict=True) if before in ready)
    assert {*found} <= ready or ready <= {*found}


def test_who_was_not_started_is_read_when_it_is_whole(tmp_path: Path):
    spec = orders(run_dir=str(tmp_path), nnodes=3, min_nodes=2)
    assert not_started(spec) == {}
    path = tmp_path / "attempts" / "002" / "node-000" / contract.NOT_STARTED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"node": 1, "host": "gpu1", "why": "no route"}) + "\n")
    assert not_started(spec) == {1: ("node 1 (gpu1)", "no route")}
    assert not_started(spec._replace(min_nodes=3)) == {}
    path.write_text('{"node": 1, "ho')
    assert not_started(spec) == {}
