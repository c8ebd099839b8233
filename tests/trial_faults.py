"""Ranks that are hurt on purpose in ``allranks test``, by code that Python runs before all else in one of them."""

from __future__ import annotations

from pathlib import Path

#: Ranks that start as plain interpreters run it; all others have no RANK yet.
_SITE = """\
import os, socket, sys, time
together = range(int(os.environ.get("TOGETHER", 0))) if "RANK" in os.environ else ()
if together:
    import torch.distributed
    here = os.path.join(os.path.dirname(__file__), "here-%s")
    open(here % os.environ["RANK"], "w").close()
    while not all(os.path.exists(here % rank) for rank in together):
        time.sleep(0.01)
fault, at = os.environ.get("FAULT"), os.environ.get("FAULT_AT")
if fault and "RANK" in os.environ and at in ("rank " + os.environ["RANK"], socket.gethostname()):
    if fault == "no torch":
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'")
        sys.meta_path.insert(0, Finder())
    else:
        from torch import distributed
        name, _, what = fault.partition(": ")
        real = getattr(distributed, name)
        def hurt(*args, **options):
            if what == "dies":
                os.kill(os.getpid(), 9)
            if what == "hangs":
                __import__("signal").pause()
            if what == "is lacking":
                raise RuntimeError("ProcessGroupNone does not support " + name)
            done = real(*args, **options)
            if (args[0].numel() > 100) == (what == "is wrong for many"):
                args[0].view(-1)[3] += 1
            return done
        setattr(distributed, name, hurt)
"""


def hurt(folder: Path, fault: str, at: str, *, together: int = 0) -> tuple[str, ...]:
    """Return the options that hurt the trial on one rank or on the ranks of one host.

    Args:
        folder: where to leave what Python runs; all nodes see it.
        fault: ``no torch``; or ``broadcast: is wrong``, ``is wrong for many`` (numbers), ``dies``, ``hangs`` or
            ``is lacking``.
        at: ``rank 1``, or a host name.
        together: so many ranks wait until all of them have imported torch: a short limit then counts what comes after.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    variables = {"PYTHONPATH": str(folder), "FAULT": fault, "FAULT_AT": at}
    if together:
        variables["TOGETHER"] = str(together)
    return ("--no-warm", *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")))
