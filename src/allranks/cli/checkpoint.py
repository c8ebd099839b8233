"""``allranks checkpoint``: lists, verifies and exports the checkpoints in a directory."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from allranks.cli import render
from allranks.cli.runs import json_option
from allranks.errors import AllranksError, UsageError
from allranks.job.problems import did_you_mean
from allranks.job.units import format_count, format_seconds, format_size
from allranks.record import checkpoints
from allranks.record.checkpoints import CheckpointEntry

_HEADER = ("STEP", "AGE", "SIZE", "RANKS", "METRIC", "STATE", "")
#: Processes that verify a checkpoint, and bytes below which one is enough.
_PROCESSES = 16
_FOR_ONE = 64 << 20
#: A directory to name where none, or one without checkpoints, was named.
SAVED = "runs/latest/checkpoints, if the script saves in ctx.run_dir"
_folder = click.argument("folder", type=click.Path(path_type=Path))


@click.group("checkpoint", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, check and export the checkpoints that ctx.checkpoints() has written."""
    if ctx.invoked_subcommand is None:
        render.talk(ctx.get_help())
        ctx.exit(UsageError.exit_code)


@command.command("ls")
@_folder
@json_option
def ls(folder: Path, as_json: bool) -> int:
    """List the checkpoints in FOLDER, the newest last. Sizes are checked; verify reads everything."""
    found = checkpoints.entries(_existing(folder))[::-1]
    latest = (folder / checkpoints.LATEST).resolve().name
    left = checkpoints.unfinished(folder)
    if as_json:
        render.as_json([_as_json(entry, latest) for entry in found])
    elif found:
        render.data(render.table(_HEADER, [_row(entry, latest) for entry in found]))
    else:
        render.talk(f"no checkpoints in {render.path(folder)}")
    for path, step, kind, _ in left:
        if kind == "tmp":
            render.talk(f"{path.name}: step {step} is being written, or was cut off")
    return 0


@command.command("verify")
@_folder
@json_option
def verify(folder: Path, as_json: bool) -> int:
    """Read all bytes of the checkpoint in FOLDER, or of all in it, and compare the checksums; 1 if one is corrupt."""
    paths = _paths(folder)
    if not paths:
        raise UsageError(f"there is no checkpoint in {folder}", fix=f"allranks checkpoint verify {SAVED}")
    results = {path: _problems(path) for path in paths[::-1]}
    if as_json:
        render.as_json([{"path": str(path), "problems": found} for path, found in results.items()])
    else:
        for path, found in results.items():
            render.data(f"{render.path(path)}: " + ("; ".join(found) or "complete"))
    return int(any(results.values()))


@command.command("export")
@_folder
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--part", metavar="NAME", help="Which part to export; the model by default.")
@click.option("--all", "everything", is_flag=True, help="Export all parts and the config; to a .pt file only.")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def export(folder: Path, target: Path, part: str | None, everything: bool, force: bool) -> int:
    """Write the model of a checkpoint into one file: TARGET ends in .safetensors, or in .pt, which needs torch.

    FOLDER is a checkpoint, or a directory of them, of which the newest complete one is taken.
    """
    if target.suffix not in (".pt", ".safetensors"):
        what = f"{target} ends neither in .safetensors nor in .pt"
        raise UsageError(what, fix=f"name the file {shlex.quote(str(target.with_suffix('.safetensors')))}")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already", fix="--force overwrites")
    if everything and (part or target.suffix != ".pt"):
        raise UsageError("--all exports everything to a .pt file", fix="leave out --part, and name a .pt file")
    path = _chosen(folder)
    manifest = checkpoints.read_manifest(path)
    name = None if everything else _part(manifest, part)
    if target.suffix == ".pt":
        _export_with_torch(path, target, name)
    else:
        from allranks.runs import safetensors

        tensors = {key.partition("/"): tensor for key, tensor in checkpoints.read_tensors(path, manifest).items()}
        chosen = {key: tensor for (part_name, _, key), tensor in tensors.items() if part_name == name}
        if not chosen:
            others = dict.fromkeys(part_name for part_name, _, _ in tensors)
            raise UsageError(f"{name} holds no tensors", fix=f"one of --part {', '.join(others)}; or a .pt file")
        safetensors.write(target, path, chosen, {"format": "pt", "step": str(manifest.step)})
    size = format_size(target.stat().st_size)
    render.talk(f"wrote {render.path(target)}: {name or 'everything'} of step {manifest.step}, {size}")
    return 0


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder}", fix=f"allranks checkpoint ls {SAVED}")
    return folder


def _paths(folder: Path) -> list[Path]:
    """Return the checkpoint that a directory is, or all that are in it, the newest first."""
    if (folder / checkpoints.MANIFEST).is_file():
        return [folder]
    return [entry.path for entry in checkpoints.entries(_existing(folder))]


def _problems(path: Path) -> list[str]:
    """Read a checkpoint; a large one with several processes, since one takes seconds for each GB."""
    size = sum(file.stat().st_size for file in path.glob("rank-*.data"))
    processes = min(os.cpu_count() or 1, _PROCESSES, size // _FOR_ONE)
    if processes < 2:
        return list(checkpoints.problems(path))
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(processes) as pool:
        shares = [pool.submit(_share, path, number, processes) for number in range(processes)]
        return sorted({problem for share in shares for problem in share.result()})


def _share(path: Path, share: int, shares: int) -> list[str]:
    return list(checkpoints.problems(path, share=share, shares=shares))


def _row(entry: CheckpointEntry, latest: str) -> tuple[str, ...]:
    manifest = entry.manifest
    mark = "latest" if entry.path.name == latest else ""
    state = f"corrupt: {entry.problem}" if entry.problem else "complete"
    if manifest is None:
        return (str(entry.step), "-", "-", "-", "-", state, mark)
    metric = "-" if manifest.metric is None else f"{manifest.metric_name or 'metric'} {manifest.metric:.6g}"
    age = format_seconds(max(0.0, time.time() - manifest.time))
    return (str(entry.step), age, format_size(manifest.size), str(manifest.world_size), metric, state, mark)


def _as_json(entry: CheckpointEntry, latest: str) -> dict[str, Any]:
    is_latest = entry.path.name == latest
    shown = {"path": str(entry.path), "step": entry.step, "latest": is_latest, "problem": entry.problem}
    for name in ("time", "size", "world_size", "epoch", "metric", "metric_name", "parts"):
        shown[name] = getattr(entry.manifest, name, None)
    return shown


def _chosen(folder: Path) -> Path:
    """Return the checkpoint to export, read and found complete."""
    for path in _paths(folder):
        found = _problems(path)
        if not found:
            return path
        if path == folder:
            raise AllranksError(f"{path} is corrupt", why=found[0], fix=f"allranks checkpoint ls {path.parent}")
        render.talk(f"{path} is corrupt and is skipped: {found[0]}")
    raise UsageError(f"there is no complete checkpoint in {folder}", fix=f"allranks checkpoint ls {SAVED}")


def _part(manifest: checkpoints.Manifest, wanted: str | None) -> str:
    if wanted in manifest.parts:
        return str(wanted)
    if wanted is not None:
        what, why = f"the checkpoint has no part {wanted}", f"it has {', '.join(manifest.parts)}"
        raise UsageError(
            what, why=why, fix=did_you_mean(wanted, manifest.parts) or f"--part {next(iter(manifest.parts))}"
        )
    models = [name for name, kind in manifest.parts.items() if kind == "module"]
    if len(models) != 1:
        fix = f"--part {models[0] if models else 'NAME'}"
        raise UsageError(f"the checkpoint has {format_count(len(models), 'model')}", fix=fix)
    return models[0]


def _export_with_torch(path: Path, target: Path, part: str | None) -> None:
    """Export in another process that imports torch, which this command does without on login nodes."""
    command = [sys.executable, "-m", "allranks.runtime.checkpoint.export", str(path), str(target), part or ""]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode == 0:
        return
    text = done.stderr.decode(errors="replace").strip()
    if "No module named 'torch'" in text:
        fix = "run this where torch is installed, or export to a .safetensors file"
        raise AllranksError(f"{target} needs torch, and {sys.executable} has none", fix=fix)
    with contextlib.suppress(ValueError):
        raise AllranksError(**json.loads(text))  # An error of ours.
    why = text.splitlines()[-1] if text else f"exit code {done.returncode}"
    raise AllranksError(f"cannot write {target}", why=why, fix="export to a .safetensors file, which needs no torch")
