"""``python -m allranks``, and the command ``allranks``."""

from __future__ import annotations

import gc
import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. Ctrl-C while it is being imported ends it as it ends any program: without a traceback."""
    gc.disable()  # What is imported stays: looking for garbage in it takes a tenth of the start.
    gc.set_threshold(50_000)  # Verbs import more, and build what they show.
    try:
        from allranks.cli.main import main as run
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise  # The signal is blocked.
    gc.freeze()
    gc.enable()
    try:
        run()
    except SystemExit as end:
        os._exit(int(end.code or 0))  # An interpreter takes up to 40 ms to finalize.


if __name__ == "__main__":
    main()
