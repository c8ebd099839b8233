"""Another user of the machine says to all ports of a run what nobody there should believe: the run continues as it was.

That user also speaks the protocol of torch's store, which has no password: ``docs/explanation/security.md`` says what
remains open there.
"""

from __future__ import annotations

import stat

import pytest

from agents_by_hand import ByHand
from allranks import contract
from strangers import ARGUMENT, ATTACKED, assert_strangers_learn_nothing, listening, why_no_strangers
from waiting import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(why_no_strangers() is not None, reason=why_no_strangers() or "")


def test_ranks_of_one_node_go_on(allranks) -> None:
    allranks.script(ATTACKED)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", "--", ARGUMENT)
    wait_for("rank 0 to work", (allranks.folder / "works").exists)
    run = allranks.run()
    (places,) = listening(run).values()
    assert {address for address, _ in places} == {"127.0.0.1"}
    assert_strangers_learn_nothing(run)
    (allranks.folder / "go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    note = "note: rank 1 waits in ctx.on_main(work): what stands in the store was not signed with this run's key"
    assert err.decode().count(note) == 1
    lines = sorted(line.split(maxsplit=1)[1] for line in out.decode().splitlines())
    assert lines == ["0 [0, 1, 2] fine 2.0", "1 [0, 1, 2] fine 2.0"]


def test_agents_and_ranks_of_two_nodes_go_on(by_hand: ByHand) -> None:
    """It takes more than 10 s on a slow machine: two agents import torch, and a stranger talks to all their ports."""
    by_hand.orders(
        ATTACKED.replace('"works"', f'"{by_hand.folder}/works"').replace('"go"', f'"{by_hand.folder}/go"'), ARGUMENT
    )
    by_hand.start(0, 1, ranks=1)
    wait_for("rank 0 to work", (by_hand.folder / "works").exists)
    (places,) = listening(by_hand.folder).values()
    assert by_hand.port in {port for _, port in places}
    assert {address for address, _ in places} == {"127.0.0.1"}
    assert_strangers_learn_nothing(by_hand.folder)
    (by_hand.folder / "go").touch()
    assert by_hand.wait() == [0, 0]
    assert [by_hand.said(node, node) for node in (0, 1)] == [f"{rank} [0, 1, 2] fine 2.0\n" for rank in (0, 1)]
    log = (by_hand.folder / "agent-0.log").read_text()
    assert log.count("closed a connection from 127.0.0.1") == 1


def test_the_key_is_for_its_owner_and_stands_nowhere_else(allranks) -> None:
    allranks.script("import os, pathlib, sys\nprint(pathlib.Path(f'/proc/{os.getppid()}/environ').read_bytes())\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    assert done.rc == 0, done.stderr
    run = allranks.run()
    file = run / contract.KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert len(bytes.fromhex(key)) == 32
    others = [path for path in run.rglob("*") if path.is_file() and path != file]
    assert [path for path in others if key.encode() in path.read_bytes()] == []
    assert key not in done.stdout + done.stderr
