"""What the job names: its script, what that imports, its configuration, and the folders that nodes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks.job.problems import listed
from allranks.preflight.arguments import is_config, named_files, named_so
from allranks.preflight.compare import odd_ones
from allranks.preflight.model import Finding, Node, Seen, failed, passed, skipped, warned
from allranks.preflight.packages import how_to_get
from allranks.preflight.parsing import why_no_config
from allranks.preflight.registry import on_each_node, on_the_whole

_UNPREPARED = "environment.node_setup is run by allranks check and by the job itself: not run here, not known"
_COPIED = "it is copied to the machines when the run starts"
#: As many missing imports are named.
_NAMED = 3


def _unknown(seen: Seen) -> str:
    """Say why it is not known what a node would run; empty where it is."""
    if not seen.has_target:
        return "no script was named"
    if seen.plan.copied_to:
        return _COPIED
    return "" if seen.is_prepared else _UNPREPARED


@on_each_node("script", why="what the ranks run must be there, on every node", fact="script")
def script(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether a node sees what the ranks run, and could read it."""
    if why := _unknown(seen):
        return skipped(why)
    if fact["error"]:
        return failed(fact["error"], fix="it must be at the same path on all nodes; --sync rsync copies it over SSH")
    return passed(
        next(reason.value for reason in seen.plan.reasons if reason.subject in ("script", "module", "binary"))
    )


@on_each_node("imports", why="an import that is not there ends all ranks at their first line", fact="script")
def imports(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether the script's imports are in the job's environment on a node."""
    if why := _unknown(seen):
        return skipped(why)
    if fact["error"] or "missing" not in fact:
        return skipped("there is no Python source to read")
    if missing := fact["missing"]:
        places = [f"{each['name']} ({Path(each['file']).name}:{each['line']})" for each in missing[:_NAMED]]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        fix = how_to_get(missing, node, seen)
        what = f"not found: {listed(places, 'and')}{more}"
        if fact["alters_path"]:
            return warned(f"{what}; the job alters where modules are found, and may find them as it runs", fix=fix)
        return failed(what, fix=fix)
    return passed(f"{fact['imports']} found")


@on_the_whole(
    "same-script", why="nodes that run different code wait for each other, or train different models", facts=("script",)
)
def same_script(seen: Seen) -> Iterator[Finding]:
    """Look at whether all nodes have the same script, and the same modules beside it."""
    digests = {
        node.host: found["digest"] for node in seen.nodes if (found := node.facts.get("script") or {}).get("digest")
    }
    if len(digests) < 2 or _unknown(seen):
        yield skipped(_unknown(seen) or "it is not read on two nodes or more")
        return
    _, odd = odd_ones(digests)
    for host in odd:
        yield warned(
            "its script, or a module beside it, differs from the other nodes'",
            fix=f"copy it to {host} again",
            host=host,
        )
    if not odd:
        yield passed("the same on all nodes")


@on_the_whole("config", why="a configuration that is not there or cannot be read ends all ranks", facts=("files",))
def config(seen: Seen) -> Iterator[Finding]:
    """Look at the files that the script's arguments name: whether they are there, and whether they can be parsed."""
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
    if is_config(option) and (why := why_no_config(path)):
        # Many read JSON with comments in it.
        return (warned if path.suffix == ".json" else failed)(f"{path}: {why}", fix="correct it there")
    without = [node.host for node in seen.nodes if (node.facts.get("files") or {}).get(str(path))]
    if without and not seen.plan.copied_to:
        return failed(f"{listed(without, 'and')} cannot read {path}", fix="put it where all nodes see it")
    return passed(f"{path} ({option})")


def _missing(option: str, path: Path, seen: Seen) -> Finding:
    """Judge of a file that is not there: a script may look for it in other folders, or write it; so may a set-up."""
    script = next((reason.value for reason in seen.plan.reasons if reason.subject == "script"), None)
    folders = [Path(seen.plan.workdir), *([Path(script).parent] if script else [])]
    if other := next(filter(None, (named_so(path.name, folder) for folder in folders)), None):
        return passed(f"{other}: taken to be what {option} means")
    if not is_config(option):
        return passed(f"{path} is not there: taken to be written by the script ({option})")
    if not seen.is_prepared:
        return passed(f"{path} is not there: taken to be written by environment.setup or .node_setup ({option})")
    return failed(f"there is no {path}, which {option} names", fix=f"correct {option}; it is relative to workdir")


@on_each_node(
    "shared", why="logs, events and checkpoints of all nodes come together in the folder of runs", fact="shared"
)
def shared(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether a node sees the folder of runs."""
    if seen.plan.copied_to:
        return skipped("machines that share no folder get copies: sync is rsync")
    if len(seen.plan.commands) == 1 and fact is None:
        return skipped("there is one node")
    if fact != seen.word:
        fix = "runs.folder (--runs-folder) on a filesystem that all nodes share, or --sync rsync over SSH"
        return failed(str(fact or "it does not see the folder of runs"), fix=fix)
    return passed(str(Path(seen.plan.run_dir).parent))


@on_the_whole(
    "versions",
    why="nodes with different versions do not understand each other, or compute differently",
    facts=("host", "torch"),
)
def versions(seen: Seen) -> Iterator[Finding]:
    """Compare the versions of Python, torch, CUDA and NCCL."""
    if not seen.is_prepared:
        yield skipped(_UNPREPARED)
        return
    nodes = [node for node in seen.nodes if "host" in node.facts and "torch" in node.facts]
    if not nodes:
        yield skipped(seen.why_no_nodes or "no node has told its versions")
        return
    told = [finding for name in ("torch", "cuda", "nccl", "python") for finding in _compared(name, nodes, seen)]
    yield from told
    if not told:
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
