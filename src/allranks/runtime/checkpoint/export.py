"""One ``.pt`` file of a checkpoint: ``python -m allranks.runtime.checkpoint.export CHECKPOINT TARGET [PART]``.

Without a part it holds all of them by name, and ``config`` and ``step`` beside them. ``torch.load`` reads it with
``weights_only=True``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from allranks.errors import AllranksError
from allranks.record.checkpoints import OBJECTS, read_file, read_manifest, read_tensors
from allranks.runtime.checkpoint.restore import load_objects, read_tensor
from allranks.runtime.checkpoint.state import join


def load(path: Path, part: str | None = None) -> dict[str, Any]:
    """Read a checkpoint, or one part of it, into plain dicts and CPU tensors, without any process group."""
    manifest = read_manifest(path)
    tensors = read_tensors(path, manifest)
    objects = load_objects(path, read_file(path, OBJECTS, manifest))
    names = [part] if part else [name for name in objects["parts"] if not name.startswith("ctx.")]
    made = {name: join(objects["parts"][name], lambda tensor: read_tensor(path, tensors[tensor])) for name in names}
    state: dict[str, Any] = made[part] if part else {**made, "config": objects["config"], "step": manifest.step}
    return state


def main(arguments: list[str]) -> None:
    """Write the file atomically; print an AllranksError as JSON on stderr."""
    path, target, part = Path(arguments[0]), Path(arguments[1]), arguments[2] if len(arguments) > 2 else ""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            torch.save(load(path, part or None), stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except AllranksError as error:
        sys.exit(json.dumps({"what": error.what, "why": error.why, "fix": error.fix}))
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
