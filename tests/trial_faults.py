"""Ranks that are hurt on purpose in ``allranks test``, by code that Python runs first in them or in their agent."""

from __future__ import annotations

from pathlib import Path

#: An agent runs it, whose ranks are forked later; or each rank that starts as a plain interpreter, with its RANK.
_SITE = """\
import importlib.util, os, socket, sys, time
fault, at = os.environ.get("FAULT"), os.environ.get("FAULT_AT")
def is_hurt():
    return "RANK" in os.environ and at in ("rank " + os.environ["RANK"], socket.gethostname())
def replace(distributed):
    name, _, what = fault.partition(": ")
    real = getattr(distributed, name)
    def hurt(*args, **options):
        if not is_hurt():
            return real(*args, **options)
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
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and fault == "no torch" and is_hurt():
            raise ModuleNotFoundError("No module named 'torch'")
        if name != "torch.distributed" or fault == "no torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module
        def execute(module):
            real(module)
            replace(module)
        spec.loader.exec_module = execute
        return spec
if fault:
    sys.meta_path.insert(0, Finder())
together = range(int(os.environ.get("TOGETHER", 0))) if "RANK" in os.environ else ()
if together:
    import torch.distributed
    here = os.path.join(os.path.dirname(__file__), "here-%s")
    open(here % os.environ["RANK"], "w").close()
    while not all(os.path.exists(here % rank) for rank in together):
        time.sleep(0.01)
"""


def hurt(folder: Path, fault: str, at: str, *, together: int = 0) -> tuple[str, ...]:
    """Return the options that hurt the trial on one rank or on the ranks of one host.

    Ranks are plain interpreters only where one of them fails to import torch, or where they wait for these imports.

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
    plain = ("--no-warm",) if together or fault == "no torch" else ()
    return (*plain, *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")))
