"""How to get a module that is missing. Its name need not be its package's, and a stranger's package may have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allranks.job.problems import listed
from allranks.preflight.model import Node, Seen

#: The packages of well-known modules; nothing else is said to be installed by its name.
_PACKAGES: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("accelerate", "datasets", "deepspeed", "diffusers", "einops", "evaluate", "h5py", "lightning"),
            *("matplotlib", "mlflow", "numpy", "omegaconf", "pandas", "peft", "safetensors", "scipy", "sentencepiece"),
            *("tensorboard", "timm", "tokenizers", "torch", "torchaudio", "torchmetrics", "torchvision", "tqdm"),
            *("transformers", "triton", "wandb", "webdataset"),
        )
    },
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "flash_attn": "flash-attn",
    "huggingface_hub": "huggingface-hub",
    "hydra": "hydra-core",
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
    "pytorch_lightning": "pytorch-lightning",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
#: Names that many give to code of their own.
_LOCAL = {
    *("common", "config", "configs", "core", "data", "dataset", "engine", "helpers", "layers", "lib", "loss", "losses"),
    *("model", "models", "modules", "net", "nets", "networks", "options", "scripts", "src", "tools", "train"),
    *("trainer", "training", "util", "utils"),
}


def how_to_get(missing: Sequence[Mapping[str, Any]], node: Node, seen: Seen) -> str:
    """Say how a node gets the modules that it lacks.

    Args:
        missing: the modules, as :func:`allranks.probe.sources.read` returns them.
        node: the node.
        seen: what is known of all nodes.
    """
    ways: dict[str, None] = {}
    others: dict[str, None] = {}
    for each in missing:
        if way := _own_way(each, node, seen):
            ways[way] = None
        else:
            others[_first(each)] = None
    return "; ".join([*ways, *_installs(others, node)])


def _installs(names: Mapping[str, None], node: Node) -> Iterator[str]:
    if not names:
        return
    python = node.facts.get("host", {}).get("executable", "python")
    packages = [_PACKAGES[name] for name in names if name in _PACKAGES]
    unknown = [name for name in names if name not in _PACKAGES]
    steps = [f"{python} -m pip install {' '.join(packages)}"] if packages else []
    steps += [f"install what has {listed(unknown, 'and')}"] if unknown else []
    yield f"{' and '.join(steps)}, or environment.venv, .conda or .modules that have it"


def _own_way(each: Mapping[str, Any], node: Node, seen: Seen) -> str:
    """Say how to get what other nodes have, and what is the job's own; empty: it has to be installed."""
    name, first = each["name"], _first(each)
    if other := next((other.host for other in seen.nodes if _has(other, name, node)), ""):
        return f"{name} is on {other}: install the same, or copy it"
    if within := each.get("within"):
        return f"{within} lacks it: copy it there, or correct the import"
    if near := each.get("near"):
        return f"{first} is in {near}, which is not on Python's path: environment.variables.PYTHONPATH: {near}"
    if first in _LOCAL:
        return f"{first} looks like code of the job's own: copy it there, or environment.variables.PYTHONPATH"
    return ""


def _has(other: Node, name: str, node: Node) -> bool:
    """Tell whether another node has a module; one that lacks a source has not come to all imports."""
    there, here = other.facts.get("script") or {}, node.facts["script"]
    if "missing" not in there:
        return False
    has_come_to_it = not there["missing"] or there["digest"] == here["digest"]
    return has_come_to_it and all(each["name"] != name for each in there["missing"])


def _first(each: Mapping[str, Any]) -> str:
    first: str = each["name"].partition(".")[0]
    return first
