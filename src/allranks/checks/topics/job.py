"""The job: whether it gets its nodes, and what its ranks run there.

That is the script, what it imports, and the files that its arguments name, on all nodes alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.checks.model import Finding, Grade, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import on_each_node, on_the_whole
from allranks.clusters.registry import load_kind
from allranks.errors import LaunchError
from allranks.job.problems import closest, listed

#: What starts within so many seconds starts now.
_NOW = 60.0
_REGARDLESS = "; --no-check submits it all the same"
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

_FILE = re.compile(r"\.(ya?ml|json|toml)$", re.IGNORECASE)
_NO_PATH = re.compile(r"://|[,;*?$%{}\[\]]|^~")
_CONFIG = re.compile(r"-+([a-z]+[-_.])*(config|conf|cfg|settings)([-_.]?(file|path|json|yaml))?", re.IGNORECASE)
#: Such an option names a file that the script writes.
_WRITTEN = re.compile(r"save|out|write|dump|export", re.IGNORECASE)
_FOLDER = re.compile(r"-+(\w+[-_])*(checkpoints?|ckpts?|output|save)[-_]?(dir|folder|path|root)?", re.IGNORECASE)

#: As many directories are searched for a file, breadth first.
_MOST_FOLDERS = 300
#: A file of more bytes is data, which would take long to parse.
_LARGEST = 1 << 20


# --- its nodes ---


@on_the_whole("scheduler", why="a scheduler rejects a job that requests more than it has, or keeps it pending forever")
def scheduler(seen: Seen) -> Iterator[Finding]:
    """Check what the scheduler would do with the job."""
    try:
        feasibility = load_kind(seen.plan.kind).feasibility(seen.plan, seen.environ)
    except LaunchError as error:
        if seen.is_submitted:  # A user who may not list nodes may still submit jobs.
            yield skipped(error.in_a_line)
            return
        fix = error.fix or f"run this where jobs of {seen.plan.cluster} can be submitted"
        yield failed(error.in_a_line, fix=fix)
        return
    if feasibility is None:
        yield skipped(f"{seen.plan.cluster}: there is no scheduler to ask")
        return
    for objection in feasibility.objections:
        if seen.is_submitted and objection.is_refusal:
            yield skipped(objection.what)  # The scheduler itself reports it next.
        elif objection.is_final:
            yield failed(objection.what, fix=objection.fix + (_REGARDLESS if seen.is_submitted else ""))
        else:
            yield warned(objection.what, fix=objection.fix)
    if feasibility.objections:
        return
    if feasibility.start is None:
        what = "it takes the job"
    elif feasibility.start - time.time() < _NOW:
        what = "the job could start now"
    else:
        what = f"the job is expected to start on {time.strftime('%A at %H:%M', time.localtime(feasibility.start))}"
    yield passed(f"{feasibility.where}: {what}")


@on_the_whole("nodes", why="no rank can start on a node that is unreachable or whose set-up fails", facts=("host",))
def nodes(seen: Seen) -> Iterator[Finding]:
    """Check that each node was probed."""
    if not seen.nodes:
        yield skipped(seen.why_no_nodes)
    lost = [node.number for node in seen.nodes if node.failure]
    needed = seen.plan.min_nodes or seen.plan.nnodes
    can_do_without = 0 not in lost and len(seen.nodes) - len(lost) >= needed  # All meet at the first one.
    for node in seen.nodes:
        if node.failure and node.failure.grade is Grade.FAIL and can_do_without:
            yield replace(node.failure, grade=Grade.WARN, why="the job starts without it")
        elif node.failure:
            yield node.failure
        elif "host" in node.facts:
            yield passed(f"Python {node.facts['host']['python']}", host=node.host)
        else:
            yield skipped(node.errors["host"], host=node.host)


# --- what the ranks run ---


def _unknown(seen: Seen) -> str:
    """Return why it is unknown what a node would run; empty if it is known."""
    if not seen.has_target:
        return "no script was named"
    if seen.plan.copied_to:
        return _COPIED
    return "" if seen.is_prepared else _UNPREPARED


@on_each_node("script", why="every node needs what the ranks run", fact="script")
def script(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that a node sees what the ranks run, and can read it."""
    if why := _unknown(seen):
        return skipped(why)
    if fact.get("is_there"):
        fix = "correct it, or choose the Python that it is written for: environment.python, .venv or .conda"
        return failed(fact["error"], why="every rank reads it", fix=fix)
    if fact["error"]:
        return failed(fact["error"], fix=_how_to_find(node, seen))
    subjects = ("script", "module", "binary")
    return passed(next(reason.value for reason in seen.plan.reasons if reason.subject in subjects))


def _how_to_find(node: Node, seen: Seen) -> str:
    """Write how a node gets what the ranks run; a single machine has nothing to copy."""
    if seen.job.module and (near := _module_beside(seen.job.module, seen.plan.workdir)):
        return f"did you mean -m {near}?"
    if seen.plan.kind != "local":
        return "it must be at the same path on all nodes; --sync rsync copies it over SSH"
    if not seen.job.module:
        return f"correct the name, which counts from {seen.plan.workdir}"
    python = node.facts.get("host", {}).get("executable", "python")
    return f"it was looked for in {seen.plan.workdir} and in {python}: correct the name, or --workdir DIR that has it"


def _module_beside(name: str, workdir: str) -> str | None:
    """Return the module of the job's directory that was probably meant."""
    *packages, last = name.split(".")
    folder = Path(workdir, *packages)
    names = {each.stem for each in folder.glob("*.py")} | {each.parent.name for each in folder.glob("*/__main__.py")}
    near = closest(last, names)
    return ".".join([*packages, near]) if near else None


@on_each_node("imports", why="a missing import fails all ranks at their first line", fact="script")
def imports(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that the script's imports are in the job's environment on a node."""
    if why := _unknown(seen):
        return skipped(why)
    if fact["error"] or "missing" not in fact:
        return skipped("there is no Python source to read")
    names = tuple(f"{each['name']}." for each in fact["missing"])
    if missing := [each for each in fact["missing"] if not each["name"].startswith(names)]:
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


@on_each_node("one-rank", why="a call that all ranks have to make waits for all of them", fact="script")
def one_rank(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check that a script makes no call on rank 0 alone that all ranks have to make."""
    if why := _unknown(seen):
        return skipped(why)
    if seen.plan.world_size == 1 or not (lone := fact.get("lone")):
        return passed("no call of rank 0 alone that all ranks have to make")
    calls = listed([f"{each['call']} ({Path(each['file']).name}:{each['line']})" for each in lone[:_NAMED]], "and")
    fix = "call it on all ranks, outside of the block that only rank 0 runs"
    return warned(f"only rank 0 calls {calls}, and would wait there for the others", fix=fix)


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


# --- files and directories that the arguments name ---


def pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values among arguments, each with the option before it, if there is one."""
    option = ""
    for word in args:
        name, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield name, value
            option = ""
        elif word.startswith("-"):
            option = word
        else:
            yield option, word
            option = ""


def named_files(args: Sequence[str], workdir: Path) -> list[tuple[str, Path]]:
    """Return the files of YAML, JSON or TOML that arguments name, each with its option.

    What only the script can make a path of is none: an address, a list, a pattern, a variable, a home.
    """
    named = ((option, value) for option, value in pairs(args) if _FILE.search(value) and not _NO_PATH.search(value))
    found = [(option or "argument", workdir / value) for option, value in named]
    return [(option, path) for option, path in found if not _WRITTEN.search(option)]


def _find_below(name: str, folder: Path) -> Path | None:
    """Find a file of that name below a directory: a script may look for its configuration there."""
    waiting, left = deque([folder]), _MOST_FOLDERS
    while waiting and left:
        left -= 1
        inside = waiting.popleft()
        if (inside / name).is_file():
            return inside / name
        with contextlib.suppress(OSError), os.scandir(inside) as entries:
            waiting += sorted(Path(entry.path) for entry in entries if entry.is_dir() and entry.name[0] != ".")
    return None


def named_folders(args: Sequence[str], workdir: Path) -> dict[str, str]:
    """Return the directories that a script is to write to, by the option."""
    found = [(option, value) for option, value in pairs(args) if _FOLDER.fullmatch(option)]
    return {option: str(workdir / value) for option, value in found if not _FILE.search(value)}


def why_no_config(path: Path) -> str | None:
    """Return why a file cannot be parsed as what its name says it is; None: it can, or no parser is here."""
    try:
        if path.stat().st_size <= _LARGEST:
            _PARSERS[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return " ".join(str(error).split())
    except RecursionError:
        return "it is nested too deeply"
    return None


def _yaml(text: str) -> None:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        for _ in YAML(typ="safe", pure=True).parse(text):  # Events alone: a tag may be the script's own.
            pass
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from error
    except YAMLError as error:  # A character that YAML has no place for.
        raise ValueError(str(error)) from error


def _toml(text: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], object]] = {".yaml": _yaml, ".yml": _yaml, ".json": json.loads, ".toml": _toml}


@on_the_whole("config", why="a missing or unreadable configuration fails all ranks", facts=("files",))
def config(seen: Seen) -> Iterator[Finding]:
    """Check that the files that the script's arguments name exist, and can be parsed."""
    named = named_files(seen.job.args, Path(seen.plan.workdir))
    if not named:
        yield skipped("no argument names a YAML, JSON or TOML file")
    for option, path in named:
        yield _config(option, path, seen)


def _config(option: str, path: Path, seen: Seen) -> Finding:
    if seen.plan.copied_to and Path(seen.plan.workdir) not in path.parents:
        return passed(f"{path} is taken to be on the machines: it is not among what is copied there ({option})")
    if not path.is_file():
        return _missing(option, path, seen)
    if _CONFIG.fullmatch(option) and (why := why_no_config(path)):
        # Many read JSON with comments in it.
        return (warned if path.suffix == ".json" else failed)(f"{path}: {why}", fix="correct it there")
    without = [node.host for node in seen.nodes if (node.facts.get("files") or {}).get(str(path))]
    if without and not seen.plan.copied_to:
        return failed(f"{listed(without, 'and')} cannot read {path}", fix="put it where all nodes see it")
    return passed(f"{path} ({option})")


def _missing(option: str, path: Path, seen: Seen) -> Finding:
    """Judge a file that is not there: a script may look for it in other directories, or write it; so may a set-up."""
    folders = [Path(seen.plan.workdir), *([seen.plan.script.parent] if seen.plan.script else [])]
    if other := next(filter(None, (_find_below(path.name, folder) for folder in folders)), None):
        return passed(f"{other}: taken to be what {option} means")
    if not _CONFIG.fullmatch(option):
        return passed(f"{path} is not there: taken to be written by the script ({option})")
    if not seen.is_prepared:
        return passed(f"{path} is not there: taken to be written by environment.setup or .node_setup ({option})")
    return failed(f"there is no {path}, which {option} names", fix=f"correct {option}; it is relative to workdir")
