"""The program that looks at a node: our own source, sent along, so that nothing has to be there but Python."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.plan.script import STRICT, set_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks.job.spec import Environment
    from allranks.plan.plan import Reason
    from allranks.probe.order import Order

#: The exit code where the interpreter is older than the program can be read by; of those no shell uses.
TOO_OLD = 74
#: Imports what it reads from stdin as if it lay in files. It must be readable by any Python 3, and by Python 2. No
#: module of it may come from the working directory, where a job may have a random.py of its own.
_BEGIN = """\
import sys
if sys.version_info < (3, 10):
    sys.stderr.write("Python %d.%d\\n" % sys.version_info[:2])
    sys.exit({too_old})
if sys.path[:1] == [""]:
    del sys.path[0]
import importlib.abc, importlib.util, json
said = json.load(sys.stdin)
class Sent(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path=None, target=None):
        if name in said["sources"]:
            spec = importlib.util.spec_from_loader(name, self, origin="sent/" + name)
            spec.has_location = True
            return spec
    def is_package(self, name):
        return any(other.startswith(name + ".") for other in said["sources"])
    def get_source(self, name):
        return said["sources"][name]
sys.meta_path.insert(0, Sent())
from allranks.probe.main import main
main(said["order"], int(sys.argv[1]))
"""


def script(*, workdir: str, environment: Environment, settings: Sequence[Reason], python: Sequence[str]) -> str:
    """Write the lines of shell that set a node up as for a job, and become the program.

    Args:
        workdir: absolute working directory of the ranks.
        environment: modules, conda, venv, set-up lines and container of the job.
        settings: variables with the reason for each.
        python: the interpreter of the ranks.
    """
    keep = "exec 3<&0 </dev/null  # the program comes by stdin: no line of a set-up may read it"
    words = (*environment.container, *python, "-c", _BEGIN.format(too_old=TOO_OLD))
    return (
        "\n".join(
            [keep, *STRICT, "", *set_up(workdir, environment, settings), "", f'exec {shlex.join(words)} "$1" <&3 3<&-']
        )
        + "\n"
    )


def program(order: Order, extra: Sequence[Path] = ()) -> str:
    """Return what the program reads: the source, and what it shall look at.

    Args:
        order: what it shall look at.
        extra: files with further modules that it may import.
    """
    sources = {path.stem: path.read_text() for path in extra}
    package = contract.installation()
    for name in contract.PROBE_CODE:
        source = package / name
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            sources[_module(file.relative_to(package))] = file.read_text()
    return json.dumps({"sources": sources, "order": json.loads(order.to_json())})


def _module(path: Path) -> str:
    """Return the name of the module that a file of the package holds."""
    parts = ("allranks", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
