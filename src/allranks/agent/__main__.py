"""Entry point of a run's code: starts a node's agent or, given an option instead of a spec file, another program.

The archive ``code`` of a run holds a copy of this file, so that Python can run the archive. A standalone script starts
this file itself, where it is installed.
"""

import sys

#: Option: module and function. Without an option the agent starts.
OTHERS = {
    "--supervise": ("allranks.agent.supervisor", "main"),
    "--supervise-alone": ("allranks.agent.supervisor", "main_alone"),
    "--task": ("allranks.agent.tasks", "main"),
    "--rank": ("allranks.agent.direct", "main"),
    "--companion": ("allranks.agent.direct", "sidecar"),
    "--notify": ("allranks.diagnosis.notify", "main"),
}

if sys.version_info < (3, 10):  # noqa: UP036 - on a node it may be any python3
    sys.exit(f"allranks: {sys.executable} is Python {sys.version.split()[0]}, and nodes need 3.10 or newer")
if sys.path[0] and __file__.endswith("/allranks/agent/__main__.py"):
    sys.path[0] = __file__[: -len("/allranks/agent/__main__.py")]
if sys.argv[1] in OTHERS:
    from importlib import import_module

    module, name = OTHERS[sys.argv[1]]
    getattr(import_module(module), name)(sys.argv[2:])

from allranks.agent.main import main  # noqa: E402 - the others need no agent

main(sys.argv)
