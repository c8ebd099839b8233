"""Plans as they are compared with golden files: what differs from place to place is replaced."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import allranks
from allranks.clusters.registry import load_kind
from allranks.job.load import load_job
from allranks.launch.submit import Launch, dry_run


def plan_of(
    folder: Path,
    text: str,
    flags: dict[str, object],
    environ: dict[str, str],
    *,
    standalone: bool = False,
    runs: str = "runs",
) -> dict[str, str]:
    """Return the files of the plan for a job in ``folder``; cluster ``lab`` is of kind slurm, ``racks`` of kind ssh,
    ``pods`` of kind pdsh, ``hall`` of kind pbs, ``grid`` of kind grid_engine.
    """
    (folder / "train.py").write_text("")
    (folder / "program").write_text("#!/bin/sh\n")
    (folder / "program").chmod(0o755)
    (folder / "job.yaml").write_text(f"{text}name: demo\n")
    kinds = "lab: {kind: slurm}\nracks: {kind: ssh}\npods: {kind: pdsh}\nhall: {kind: pbs}\ngrid: {kind: grid_engine}\n"
    (folder / "clusters.yaml").write_text(kinds)
    loaded = load_job(folder / "job.yaml", flags=flags, environ={}, cwd=folder)
    launch = Launch(loaded.job, "", loaded.folder, folder / runs, {"PATH": os.environ["PATH"], **environ})
    kind = load_kind(loaded.cluster.kind)
    plan = dry_run(launch, kind)
    if standalone:
        plan = kind.plan(launch.request(Path(plan.run_dir))._replace(standalone=True))
    places = {
        plan.run_id: "RUN",
        str(folder): "/project",
        str(Path(allranks.__file__).parent): "/package/allranks",
        shlex.quote(sys.executable): "PYTHON",
        allranks.__version__: "VERSION",
    }
    return {file.path: _replaced(file.text, places) for file in plan.files}


def golden_name(job: str, path: str) -> str:
    """Return the name of the golden file for a file of a job's plan: ``2x4.sbatch``, ``2x4.node.sh``, ``2x4.json``."""
    suffix = path.removeprefix("script") if path.startswith("script") else f".{path}"
    return f"{job}{suffix.replace('.node.json', '.json')}"


def _replaced(text: str, places: dict[str, str]) -> str:
    for here, name in places.items():
        text = text.replace(here, name)
    return text
