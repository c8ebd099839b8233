"""Agents of several nodes, all on this machine: they start, fail, restart and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from agents_by_hand import ByHand
from allranks import contract
from waiting import PATIENCE, is_alive, wait_for

HOST = socket.gethostname()
TELL = """\
import os, sys, time, torch, torch.distributed as dist
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def meet():
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
    print(*(os.environ[name] for name in names.split()), int(value), flush=True)
def hang():
    while True:
        time.sleep(0.05)
"""
#: Each rank waits in a collective operation, as in a training, and fails when another is gone.
TRAIN = TELL + "meet()\nwhile True:\n    dist.barrier()\n    time.sleep(0.02)\n"


@pytest.fixture
def run(by_hand: ByHand) -> ByHand:
    """Give a run of two nodes whose agents are started by hand."""
    return by_hand


def test_nodes_form_one_world_in_their_order(run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: three agents import torch."""
    run.nodes = 3
    run.orders(TELL + "meet()")
    run.start(2, ranks=1)
    run.start(1, 0)
    assert run.wait() == [0, 0, 0]
    told = [run.said(node, rank) for node, rank in ((0, 0), (0, 1), (1, 2), (1, 3), (2, 4))]
    assert told == [
        "0 0 5 2 0 3 0 10\n",
        "1 1 5 2 0 3 0 10\n",
        "2 0 5 2 1 3 0 10\n",
        "3 1 5 2 1 3 0 10\n",
        "4 0 5 1 2 3 0 10\n",
    ]
    assert [run.ended(node) for node in range(3)] == [("SUCCEEDED", 0, None, None)] * 3


def test_ranks_of_several_nodes_that_never_meet_are_noted_on_all(run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, one after the other."""
    run.orders("import torch")
    run.start(ranks=1)
    assert run.wait() == [0, 0]
    note = (
        "the 2 ranks formed no process group: each ran the whole script alone; "
        "write allranks.init() or torch.distributed.init_process_group()"
    )
    assert [run.ended(node) for node in range(2)] == [("SUCCEEDED", 0, None, note)] * 2


def test_ranks_that_end_apart_are_waited_for_and_then_all_agents_end_at_once(run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, one after the other."""
    run.orders(
        TELL + "meet()\ndist.destroy_process_group()\nwhile rank == 3 and not os.path.exists('go'): time.sleep(.01)"
    )
    run.start()
    run.event(0, contract.RANK_EXITED, 2)
    run.event(1, contract.RANK_EXITED)
    assert [agent.poll() for agent in run.agents.values()] == [None, None]
    (run.folder / "go").touch()
    assert run.wait() == [0, 0]
    ends = {event["rank"]: event["ended"] for node in (0, 1) for event in run.events(node, contract.RANK_EXITED)}
    assert max(ends[0], ends[1], ends[2]) < ends[3]
    assert all(event["time"] >= ends[3] for node in (0, 1) for event in run.events(node, contract.ENDED))


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_failure_of_any_node_is_that_of_all(run: ByHand, node: int) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, one after the other."""
    run.orders(TELL + f"meet()\nif rank == {2 * node + 1}: sys.exit(7)\ndist.barrier()\nhang()")
    run.start()
    assert run.wait() == [7, 7]
    reason = f"rank {2 * node + 1} on {HOST} exited with code 7"
    assert [run.ended(node) for node in (0, 1)] == [("FAILED", 7, 2 * node + 1, reason)] * 2
    assert not run.events(0, contract.RESTART)


def test_restarts_are_counted_over_all_nodes(run: ByHand) -> None:
    """Three failures in turn on both nodes: two restarts are allowed.

    It takes more than 10 s on a slow machine: two agents import torch, one after the other.
    """
    fail = "meet()\ndist.barrier()\nif rank == (1, 2, 0)[generation]: os.kill(os.getpid(), 9)\ndist.barrier()\nhang()"
    run.orders(TELL + fail, max_restarts=2)
    run.start()
    assert run.wait() == [137, 137]
    for node in (0, 1):
        restarts = run.events(node, contract.RESTART)
        assert [(event["restart"], event["because_of_rank"]) for event in restarts] == [(1, 1), (2, 2)]
        assert run.ended(node) == ("FAILED", 137, 0, f"rank 0 on {HOST} was killed by SIGKILL")
        ports = [event["master_port"] for event in run.events(node, contract.RANKS_STARTED)]
        assert len(set(ports)) == 3
    assert run.said(1, 3) == "".join(f"3 1 4 2 1 2 {generation} 6\n" for generation in range(3))


def test_a_node_that_dies_is_gone_without(run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: three agents import torch."""
    run.nodes = 3
    run.orders(TRAIN, min_nodes=2)
    run.start(ranks=1)
    pids = [run.pids(node) for node in range(3)]
    wait_for_line(run, 2, 2, "2 0 3 1 2 3 0 3")
    run.agents[1].kill()
    run.event(0, contract.RANKS_STARTED, 2)
    wait_for_line(run, 0, 0, "0 0 2 1 0 2 1 1")
    wait_for_line(run, 2, 1, "1 0 2 1 1 2 1 1")
    for node in (0, 2):
        (lost,) = run.events(node, contract.NODE_LOST)
        assert (lost["node"], lost["why"]) == (1, "its agent is gone")
        (restart,) = run.events(node, contract.RESTART)
        assert (restart["because_of_rank"], restart["delay"]) == (None, 0)
    wait_for("the end of its ranks", lambda: not any(map(is_alive, pids[1])))
    run.agents[2].kill()
    assert run.wait(0) == [1]
    reason = f"node 2 ({HOST}) was lost: its agent is gone (1 of 3 nodes left, 2 needed)"
    assert run.ended(0) == ("FAILED", 1, None, f"node 1 ({HOST}) was lost: its agent is gone; {reason}")
    assert run.events(0, contract.ENDED)[0]["lost"] == [f"node 1 ({HOST})", f"node 2 ({HOST})"]


def test_a_spare_node_takes_the_place_of_one_that_dies(run: ByHand) -> None:
    """A spare that is asked to end leaves alone; the other one gets the ranks of the lost node, in their order.

    It takes more than 10 s: five agents, and torch is imported in each that has ranks.
    """
    run.nodes = 5
    run.orders(TRAIN, min_nodes=3, spares=2)
    run.start(ranks=1)
    wait_for_line(run, 2, 2, "2 0 3 1 2 3 0 3")
    run.event(3, contract.WAITING)
    run.event(4, contract.WAITING)
    run.agents[3].terminate()
    assert run.wait(3) == [143]
    assert run.ended(3) == ("CANCELLED", 143, None, "got SIGTERM")
    run.agents[1].kill()
    wait_for_line(run, 0, 0, "0 0 3 1 0 3 1 3")
    wait_for_line(run, 4, 1, "1 0 3 1 1 3 1 3")
    wait_for_line(run, 2, 2, "2 0 3 1 2 3 1 3")
    lost = [(event["node"], event["why"], event["goes_on"]) for event in run.events(0, contract.NODE_LOST)]
    assert lost == [(3, "it was to end: got SIGTERM", True), (1, "its agent is gone", True)]
    run.agents[2].terminate()
    assert run.wait(0, 2, 4) == [143] * 3


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_needed_and_dies_ends_all(run: ByHand, node: int) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, one after the other."""
    run.orders(TRAIN, max_restarts=3)
    run.start()
    wait_for_line(run, 0, 1, "1 1 4 2 0 2 0 6")
    run.agents[node].kill()
    (code,) = run.wait(1 - node)
    state, exit_code, rank, reason = run.ended(1 - node)
    assert (code, state, exit_code, rank) == (1, "FAILED", 1, None)
    assert str(reason).startswith(f"node {node} ({HOST}) was lost: its agent is gone")
    assert run.events(1 - node, contract.ENDED)[0]["lost"] == [f"node {node} ({HOST})"]
    assert not run.events(1 - node, contract.RESTART)


def test_a_node_that_comes_late_is_taken_in(run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, one after the other."""
    run.orders(TELL + "meet()\nif dist.get_world_size() == 1: hang()", min_nodes=1)
    run.start(0, ranks=1)
    wait_for_line(run, 0, 0, "0 0 1 1 0 1 0 0")
    run.start(1, ranks=1)
    assert run.wait() == [0, 0]
    assert run.said(0, 0) == "0 0 1 1 0 1 0 0\n0 0 2 1 0 2 1 1\n"
    assert run.said(1, 1) == "1 0 2 1 1 2 1 1\n"
    assert run.events(0, contract.RESTART)[0]["because_of_rank"] is None


@pytest.mark.parametrize("node", [0, 1])
def test_who_stops_one_agent_stops_all(run: ByHand, node: int) -> None:
    leaves = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n"
    run.orders(f"{leaves}print('up', flush=True)\nwhile True: time.sleep(0.05)")
    run.start()
    for rank in range(4):
        wait_for_line(run, rank // 2, rank, "up")
    run.agents[node].send_signal(signal.SIGTERM)
    assert run.wait() == [143, 143]
    assert run.ended(node) == ("CANCELLED", 143, None, "got SIGTERM")
    assert run.ended(1 - node) == ("CANCELLED", 143, None, f"node {node} ({HOST}): got SIGTERM")
    assert [run.said(1 - node, 2 * (1 - node) + local).splitlines()[-1] for local in (0, 1)] == ["bye", "bye"]


def test_ranks_that_saved_and_left_end_all_agents_so(run: ByHand) -> None:
    """It takes more than 10 s: two agents import torch, and their ranks what an optimizer needs."""
    script = """\
        import os, sys, time, torch, allranks
        with allranks.init() as ctx:
            net = ctx.prepare(torch.nn.Linear(2, 1))
            optimizer = ctx.optimizer(torch.optim.SGD, net, lr=0.1)
            checkpoints = ctx.checkpoints("saved", net=net, optimizer=optimizer)
            while True:
                ctx.backward(net(torch.ones(1, 2)).sum())
                optimizer.step()
                if checkpoints.step():
                    break
                print(ctx.progress.step, flush=True)
                time.sleep(0.01)
            sys.exit(75)
        """
    run.orders("\n".join(line[8:] for line in script.splitlines()), stop_timeout=600.0)
    run.start(ranks=1)
    wait_for_line(run, 0, 0, "3")
    wait_for_line(run, 1, 1, "3")
    run.agents[1].send_signal(signal.SIGUSR1)
    assert run.wait() == [75, 75]
    told = ("PREEMPTED", 75, None, "the ranks have saved and exited, as requested")
    assert [run.ended(node) for node in (0, 1)] == [told] * 2
    begun, noted, left = map(json.loads, (run.folder / contract.CHECKPOINTS_FILE).read_text().splitlines())
    assert begun == {"attempt": 0, "step": 0, "path": None, "leaving": False, "time": begun["time"]}
    assert left == {**noted, "leaving": True, "time": left["time"]}
    assert begun["time"] <= noted["time"] <= left["time"]
    assert (noted["attempt"], noted["path"]) == (0, str(run.folder / "saved" / f"step-{noted['step']:09d}"))
    assert (run.folder / "saved" / f"step-{noted['step']:09d}").is_dir()


def test_a_rank_that_waits_for_one_of_another_node_leaves_when_that_is_killed(run: ByHand) -> None:
    """Nobody on its own machine can see that: node 0's agent tells it.

    It takes more than 10 s on a slow machine: two agents import torch, one after the other.
    """
    script = """
import os, signal, torch, allranks
from allranks.runtime import peers
from allranks.runtime.checkpoint.directory import CheckpointDirectory
peers._machine = lambda: [os.environ["GROUP_RANK"]]  # The nodes of this test are one machine.
with allranks.init() as ctx:
    if ctx.rank == 1:
        CheckpointDirectory.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = ctx.prepare(torch.nn.Linear(4, 4), strategy="fsdp")
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    checkpoints.save()
    checkpoints.wait()
"""
    run.orders(script, stop_timeout=600.0)  # More than this waits: it leaves by itself.
    run.start(ranks=1)
    assert run.wait() == [137, 137]
    (ended,) = run.events(0, contract.RANK_EXITED)
    assert ended["code"] != -signal.SIGKILL


def test_who_dials_another_run_does_not_take_part_in_it(run: ByHand, tmp_path: Path) -> None:
    """It takes more than 10 s: three agents import torch, and one of them dials in vain for 3 s."""
    other = ByHand(tmp_path / "runs" / "other", run.env, port=run.port)
    try:
        run.orders(TELL + "meet()")
        other.orders(TELL + "meet()")
        run.start(0, ranks=1)
        run.event(0, contract.AGENT_STARTED)
        other.start(1, ranks=1)
        assert other.wait(1) == [1]
        (error,) = other.events(1, contract.ERROR)
        assert error["what"] == f"node 1 ({HOST}) cannot reach node 0 at 127.0.0.1:{run.port} for 3 s"
        assert error["why"] == "the agent there has another key, or has ended"
        run.start(1, ranks=1)
        assert run.wait() == [0, 0]
    finally:
        other.close()


def test_an_agent_that_cannot_go_on_says_so_to_all(run: ByHand) -> None:
    """The fork server of node 1, the parent of its ranks, is killed."""
    run.orders(TRAIN)
    run.start(ranks=1)
    wait_for_line(run, 1, 1, "1 0 2 1 1 2 0 1")
    fork_server = int(Path(f"/proc/{run.pids(1)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(fork_server, signal.SIGKILL)
    assert run.wait() == [1, 1]
    why = "the process that starts ranks has ended"
    reason = f"node 1 ({HOST}) was lost: {why} (1 of 2 nodes left, 2 needed)"
    assert run.ended(0) == ("FAILED", 1, None, reason)
    assert run.ended(1) == ("FAILED", 1, None, f"{why}; its ranks were killed with it")


def test_a_port_in_use_and_a_place_half_told(run: ByHand) -> None:
    run.orders(TELL + "meet()")
    with socket.create_server(("", run.port)):
        run.start(0)
        assert run.wait(0) == [1]
    assert run.ended(0) == ("FAILED", 1, None, f"cannot listen on port {run.port} of this machine")
    assert f"error: cannot listen on port {run.port} of this machine\n  why: Address already in use" in run.log(0)
    run.start(1, ALLRANKS_RDZV_PORT=None, ALLRANKS_NODE_NPROC=None)
    assert run.wait(1) == [1]
    missing = "ALLRANKS_NODE_NPROC and ALLRANKS_RDZV_PORT not set"
    assert run.log(1).startswith(f"error: agent on {HOST}: invalid node environment: {missing}\n  why: 4 of 6 are\n")


def wait_for_line(run: ByHand, node: int, rank: int, line: str) -> None:
    """Wait until a rank has said a line."""
    deadline = time.monotonic() + PATIENCE
    while line not in run.said(node, rank).splitlines():
        assert time.monotonic() < deadline, f"{run.said(node, rank)}{run.said(node, rank, 'err')}{run.log(node)}"
        time.sleep(0.01)
