"""A node's agent, from its orders to its exit code.

``python <run>/code <run>/node-000.json`` starts it. First torch is imported, if the ranks need it, then the starter
is forked: it stays as it is, and everything that makes threads or connections happens on this side of the fork.
With ``--companion``, ``--again`` or ``--settings`` in place of the orders it does what a scheduler's script has to do
besides.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from allranks import contract
from allranks.agent import warmth
from allranks.agent.listener import listen_for
from allranks.agent.node import Start, fail_early, leave_early, run_node
from allranks.agent.place import is_placed, placed
from allranks.agent.rank import become
from allranks.agent.starter import Starter
from allranks.agent.stop import SIGNALS, WARNINGS, Stop
from allranks.agent.telling import complain
from allranks.contract import NodeSpec
from allranks.errors import AllranksError

if TYPE_CHECKING:
    from allranks.agent.network import Setting

#: Set when this process found, after it had imported torch, that it must not fork ranks, and began again.
_PLAIN = "ALLRANKS_PLAIN_BECAUSE"


def main(argv: list[str]) -> NoReturn:
    """Run the agent of the node whose orders are in ``argv[1]``; ends with the job's exit code here."""
    began = time.time()
    if argv[1] in _OTHER_TASKS:
        _OTHER_TASKS[argv[1]](argv[2:])
    gc.disable()  # Until all is imported: going over what torch has loaded takes a tenth of a second each time.
    node = _read_orders(argv[1])
    stop = Stop(lambda stop: leave_early(node, stop))
    stop.listen()
    listener = _listen_for_others(node)
    settings = _settings(node)
    plain = os.environ.pop(_PLAIN, None) or warmth.why_plain(node)
    needs_torch = warmth.needs_torch(node)
    if plain is None and needs_torch:
        plain = _warm_up(node, argv, settings)
    channel = _fork_starter(node, listener)
    outcome = run_node(node, Start(channel, plain, needs_torch, began, stop, listener, tuple(settings)))
    # At once: an interpreter with torch in it takes a tenth of a second to take itself apart.
    os._exit(outcome.exit_code)


def _companion(argv: list[str]) -> NoReturn:
    from allranks.agent.companion import main

    main(argv)


def _again(argv: list[str]) -> NoReturn:
    from allranks.agent.again import main

    main(argv)


def _print_settings(_: list[str]) -> NoReturn:
    from allranks.agent.settings import main

    main()


_OTHER_TASKS: dict[str, Callable[[list[str]], NoReturn]] = {
    "--companion": _companion,
    "--again": _again,
    "--settings": _print_settings,
}


def _read_orders(path: str) -> NodeSpec:
    spec = NodeSpec.from_json(Path(path).read_text(encoding="utf-8"))
    try:
        return placed(spec, os.environ)
    except AllranksError as error:
        complain(f"error: {error}")  # Of which node, and so into which folder, is what is not known.
        os._exit(error.exit_code)


def _listen_for_others(node: NodeSpec) -> socket.socket | None:
    """Listen on node 0 of several, before all else: others may dial while torch is being imported here."""
    if node.nnodes == 1 or node.node:
        return None
    try:
        return listen_for(node.master_addr, node.master_port)
    except AllranksError as error:
        fail_early(node, error)


def _settings(node: NodeSpec) -> list[Setting]:
    """Decide about network and threads, and set it: some of it is read when torch is imported."""
    if node.nnodes == 1 and not is_placed(os.environ):
        return []  # The script of this machine has said it all.
    from allranks.agent import network

    settings = network.decide(node.master_addr, node.nnodes, node.nproc_per_node, os.environ)
    network.apply(settings, os.environ)
    return settings


def _warm_up(node: NodeSpec, argv: list[str], settings: list[Setting]) -> str | None:
    """Import torch; where forking turns out to be unsafe, begin again in an interpreter without it."""
    try:
        import torch

        if warmth.makes_optimizers(node):
            import torch._dynamo  # noqa: F401
    except Exception:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
        return "torch cannot be imported"  # The agent says more: it needs torch itself.
    unsafe = warmth.why_unsafe_to_fork()
    if unsafe:
        os.environ[_PLAIN] = unsafe
        for setting in settings:
            os.environ.pop(setting.name, None)  # To be decided, and told, again.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until they are listened for again.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], argv[1]])
    return None


def _fork_starter(node: NodeSpec, listener: socket.socket | None = None) -> socket.socket:
    """Fork the process that starts ranks and return our end of the socket to it."""
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until the starter ignores them.
    if os.fork() == 0:
        ours.close()
        if listener:
            listener.close()  # Else others would be let in when the agent is gone.
        _be_starter(theirs, node)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))
    theirs.close()
    return ours


def _be_starter(channel: socket.socket, node: NodeSpec) -> NoReturn:
    try:
        starter = Starter(channel, node.stop_timeout)
        order = starter.serve()
        starter.forget()
        os.environ.pop(contract.LIFELINE, None)  # STDIN stays, for the rank to connect.
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
