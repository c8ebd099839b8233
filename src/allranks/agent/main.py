"""A node's agent, from its orders to its exit code.

``python <run>/code <run>/node-000.json`` starts it. First torch is imported, if the ranks need it, then the starter
is forked: it stays as it is, and everything that makes threads or connections happens on this side of the fork.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.agent import warmth
from allranks.agent.node import Start, leave_early, run_node
from allranks.agent.rank import become
from allranks.agent.starter import Starter
from allranks.agent.stop import SIGNALS, WARNINGS, Stop
from allranks.agent.telling import complain
from allranks.contract import NodeSpec

#: Set when this process found, after it had imported torch, that it must not fork ranks, and began again.
_PLAIN = "ALLRANKS_PLAIN_BECAUSE"


def main(argv: list[str]) -> NoReturn:
    """Run the agent of the node whose orders are in ``argv[1]``; ends with the job's exit code here."""
    began = time.time()
    gc.disable()  # Until all is imported: going over what torch has loaded takes a tenth of a second each time.
    node = NodeSpec.from_json(Path(argv[1]).read_text(encoding="utf-8"))
    stop = Stop(lambda stop: leave_early(node, stop))
    stop.listen()
    plain = os.environ.pop(_PLAIN, None) or warmth.why_plain(node)
    needs_torch = warmth.needs_torch(node)
    if plain is None and needs_torch:
        plain = _warm_up(argv)
    channel = _fork_starter(node)
    outcome = run_node(node, Start(channel, plain, needs_torch, began, stop))
    # At once: an interpreter with torch in it takes a tenth of a second to take itself apart.
    os._exit(outcome.exit_code)


def _warm_up(argv: list[str]) -> str | None:
    """Import torch; where forking turns out to be unsafe, begin again in an interpreter without it."""
    try:
        import torch  # noqa: F401
    except Exception:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
        return "torch cannot be imported"  # The agent says more: it needs torch itself.
    unsafe = warmth.why_unsafe_to_fork()
    if unsafe:
        os.environ[_PLAIN] = unsafe
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until they are listened for again.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], argv[1]])
    return None


def _fork_starter(node: NodeSpec) -> socket.socket:
    """Fork the process that starts ranks and return our end of the socket to it."""
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until the starter ignores them.
    if os.fork() == 0:
        ours.close()
        _be_starter(theirs, node)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))
    theirs.close()
    return ours


def _be_starter(channel: socket.socket, node: NodeSpec) -> NoReturn:
    try:
        starter = Starter(channel, node.stop_timeout)
        order = starter.serve()
        starter.forget()
        os.environ.pop(contract.LIFELINE, None)
    except BaseException:  # noqa: BLE001 - in the starter or in a new rank: neither may go on as an agent
        complain()
        os._exit(1)
    if order is None:
        os._exit(0)
    # From here on this process is a rank: it must end as an interpreter ends, not return to the agent's code.
    become(order, _umask())


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
