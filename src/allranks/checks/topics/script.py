"""What the ranks run: the script and what it imports, on all nodes alike, and the versions that it runs with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.checks.model import Finding, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.job.problems import listed

_UNPREPARED = "environment.node_setup is run by allranks check and by the job itself: not run here, not known"
_COPIED = "it is copied to the machines when the run starts"
#: As many missing imports are named.
_NAMED = 3
#: Well-known modules, with their packages where these are called otherwise. No other package is proposed: an
#: unrelated one may have that name.
_KNOWN = """
    accelerate attr=attrs bs4=beautifulsoup4 cv2=opencv-python-headless datasets dateutil=python-dateutil deepspeed
    diffusers einops evaluate flash_attn=flash-attn h5py huggingface_hub=huggingface-hub hydra=hydra-core lightning
    matplotlib mlflow numpy omegaconf pandas peft PIL=pillow pynvml=nvidia-ml-py pytorch_lightning=pytorch-lightning
    safetensors scipy sentencepiece skimage=scikit-image sklearn=scikit-learn tensorboard timm tokenizers torch
    torchaudio torchmetrics torchvision tqdm transformers triton wandb webdataset yaml=PyYAML
"""
_PACKAGES = {module: package or module for module, _, package in (each.partition("=") for each in _KNOWN.split())}
#: Names that many give to modules of their own.
_LOCAL = {
    *("common", "config", "configs", "core", "data", "dataset", "engine", "helpers", "layers", "lib", "loss", "losses"),
    *("model", "models", "modules", "net", "nets", "networks", "options", "scripts", "src", "tools", "train"),
    *("trainer", "training", "util", "utils"),
}


def _unknown(seen: Seen) -> str:
    """Return why it is unknown what a node would run; empty if it is known."""
    if not seen.has_target:
        return "no script was named"
    if seen.plan.copied_to:
        return _COPIED
    return "" if seen.is_prepared else _UNPREPARED


@on_each_node("script", why="every node needs the script", fact="script")
def script(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that a node sees what the ranks run, and can read it."""
    if why := _unknown(seen):
        return skipped(why)
    if fact["error"]:
        return failed(fact["error"], fix="it must be at the same path on all nodes; --sync rsync copies it over SSH")
    subjects = ("script", "module", "binary")
    return passed(next(reason.value for reason in seen.plan.reasons if reason.subject in subjects))


@on_each_node("imports", why="a missing import fails all ranks at their first line", fact="script")
def imports(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the script's imports are in the job's environment on a node."""
    if why := _unknown(seen):
        return skipped(why)
    if fact["error"] or "missing" not in fact:
        return skipped("there is no Python source to read")
    if missing := fact["missing"]:
        places = [f"{each['name']} ({Path(each['file']).name}:{each['line']})" for each in missing[:_NAMED]]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        fix = _how_to_get(missing, node, seen)
        what = f"not found: {listed(places, 'and')}{more}"
        if fact["alters_path"]:
            return warned(f"{what}; the job alters where modules are found, and may find them as it runs", fix=fix)
        return failed(what, fix=fix)
    return passed(f"{fact['imports']} found")


def _how_to_get(missing: Sequence[Mapping[str, Any]], node: Node, seen: Seen) -> str:
    """Write how a node gets the modules that it lacks."""
    ways: list[str] = []
    names: list[str] = []
    for each in missing:
        name, near = each["name"], each["near"]
        top = name.partition(".")[0]
        if other := next((other.host for other in seen.nodes if _has(other, name, node)), ""):
            ways.append(f"{name} is on {other}: install the same, or copy it")
        elif near:
            ways.append(f"{top} is in {near}, which is not on Python's path: environment.variables.PYTHONPATH: {near}")
        elif top in _LOCAL:
            ways.append(f"{top} looks like code of the job's own: copy it there, or environment.variables.PYTHONPATH")
        else:
            names.append(top)
    ways, names = [*dict.fromkeys(ways)], [*dict.fromkeys(names)]
    if not names:
        return "; ".join(ways)
    python = node.facts.get("host", {}).get("executable", "python")
    packages = [_PACKAGES[name] for name in names if name in _PACKAGES]
    unknown = [name for name in names if name not in _PACKAGES]
    steps = [f"{python} -m pip install {' '.join(packages)}"] if packages else []
    steps += [f"install what has {listed(unknown, 'and')}"] if unknown else []
    return "; ".join([*ways, f"{' and '.join(steps)}, or environment.venv, .conda or .modules that have it"])


def _has(other: Node, name: str, node: Node) -> bool:
    """Return True if another node has a module; one that lacks a source has not come to all imports."""
    there, here = other.facts.get("script") or {}, node.facts["script"]
    if "missing" not in there:
        return False
    has_come_to_it = not there["missing"] or there["digest"] == here["digest"]
    return has_come_to_it and all(each["name"] != name for each in there["missing"])


@on_the_whole("same-script", why="nodes with different code hang, or train different models", facts=("script",))
def same_script(seen: Seen) -> Iterator[Finding]:
    """Check that all nodes have the same script, and the same modules beside it."""
    digests = {
        node.host: found["digest"] for node in seen.nodes if (found := node.facts.get("script") or {}).get("digest")
    }
    if len(digests) < 2 or _unknown(seen):
        yield skipped(_unknown(seen) or "it is not read on two nodes or more")
        return
    _, odd = odd_ones(digests)
    for host in odd:
        what = "its script, or a module beside it, differs from the other nodes'"
        yield warned(what, fix=f"copy it to {host} again", host=host)
    if not odd:
        yield passed("the same on all nodes")


@on_each_node(
    "shared", why="logs, events and checkpoints of all nodes are written to the runs directory", fact="shared"
)
def shared(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that a node sees the directory of runs."""
    if seen.plan.copied_to:
        return skipped("machines that share no directory get copies: sync is rsync")
    if len(seen.plan.commands) == 1 and fact is None:
        return skipped("there is one node")
    if fact != seen.word:
        fix = "runs.folder (--runs-folder) on a filesystem that all nodes share, or --sync rsync over SSH"
        return failed(str(fact or "it does not see the runs directory"), fix=fix)
    return passed(str(Path(seen.plan.run_dir).parent))


@on_the_whole(
    "versions",
    why="nodes with different versions cannot communicate, or compute different results",
    facts=("host", "torch"),
)
def versions(seen: Seen) -> Iterator[Finding]:
    """Compare the versions of Python, torch, CUDA and NCCL."""
    if not seen.is_prepared:
        yield skipped(_UNPREPARED)
        return
    nodes = [node for node in seen.nodes if "host" in node.facts and "torch" in node.facts]
    if not nodes:
        yield skipped(seen.why_no_nodes or "no node reported its versions")
        return
    differing = [finding for name in ("torch", "cuda", "nccl", "python") for finding in _compared(name, nodes, seen)]
    yield from differing
    if not differing:
        torch, python = nodes[0].facts["torch"], nodes[0].facts["host"]["python"]
        parts = [
            f"{name} {torch[key]}"
            for name, key in (("torch", "version"), ("CUDA", "cuda"), ("NCCL", "nccl"))
            if torch and torch[key]
        ]
        yield passed(", ".join([f"Python {python}", *(parts or ["no torch"])]))


def _compared(name: str, nodes: list[Node], seen: Seen) -> Iterator[Finding]:
    common, odd = odd_ones({node.host: _version(name, node, seen.plan.backend) for node in nodes})
    fatal = name == "torch" or (name == "nccl" and seen.plan.backend == "nccl")
    for host, value in odd.items():
        make = failed if fatal else warned
        what = f"{name} {value or 'missing'}, and {common or 'none'} on the others"
        yield make(what, fix=f"install the same on {host}", host=host, exclude=host)


def _version(name: str, node: Node, backend: str) -> str:
    """Return a version as far as it has to agree: patch levels of Python need not, nor builds of torch over gloo."""
    if name == "python":
        return ".".join(str(node.facts["host"]["python"]).split(".")[:2])
    found = str((node.facts["torch"] or {}).get({"torch": "version"}.get(name, name)) or "")
    if backend == "nccl":
        return found
    return found.partition("+")[0] if name == "torch" else ""
