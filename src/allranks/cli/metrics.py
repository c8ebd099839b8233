"""``allranks metrics``: runs as OpenMetrics text, for a site's Prometheus.

All metrics are gauges, so that the text without its last line is also valid in Prometheus' older format, the only one
that the textfile collector of the node exporter reads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import complete_run, find_each, find_unfinished, folder_option
from allranks.errors import AllranksError, RunFolderError, UsageError
from allranks.record.events import read_saves
from allranks.record.files import write_atomically
from allranks.runs.metrics import MetricLine, read_metrics
from allranks.runs.record import Run
from allranks.runs.status import State
from allranks.runs.usage import TRAFFIC, node_usage

#: The last line of OpenMetrics text.
END = "# EOF\n"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
#: The metrics, in the order of the text, with their help.
HELP = {
    "allranks_run": "1 for each run, with its name, cluster and kind of cluster.",
    "allranks_run_state": "1 for the state that the run is in, 0 for the others.",
    "allranks_run_attempt": "Number of the newest attempt, from 1.",
    "allranks_run_restarts": "Restarts of all ranks in the newest attempt.",
    "allranks_run_ranks": "Ranks.",
    "allranks_run_nodes": "Nodes.",
    "allranks_run_created_timestamp_seconds": "When the run was created, in seconds since 1970.",
    "allranks_run_started_timestamp_seconds": "When the run started, in seconds since 1970.",
    "allranks_run_ended_timestamp_seconds": "When the run ended, in seconds since 1970.",
    "allranks_run_step": "Last step that ctx.metrics.log has recorded.",
    "allranks_run_steps_per_second": "Steps per second when it was recorded.",
    "allranks_run_metric": "Last value of each metric that ctx.metrics.log has recorded.",
    "allranks_run_checkpoint_step": "Step of the newest checkpoint of ctx.checkpoints.",
    "allranks_node_cpus": "CPUs that the run keeps busy on a node.",
    "allranks_node_memory_bytes": "Memory that the run holds on a node.",
    "allranks_node_received_bytes_per_second": "What comes in over the network of a node, InfiniBand included.",
    "allranks_node_sent_bytes_per_second": "What goes out over the network of a node, InfiniBand included.",
    "allranks_node_read_bytes_per_second": "What the run reads from storage on a node.",
    "allranks_node_written_bytes_per_second": "What the run writes to storage on a node.",
    "allranks_node_sampled_timestamp_seconds": "When a node was sampled, in seconds since 1970.",
    "allranks_gpu_busy_ratio": "Part of the time in which a GPU was busy, from 0 to 1.",
    "allranks_gpu_memory_bytes": "Memory that is in use on a GPU.",
    "allranks_gpu_memory_total_bytes": "Memory of a GPU.",
    "allranks_gpu_clock_hertz": "Clock of the multiprocessors of a GPU, the median of the last minute.",
    "allranks_gpu_temperature_celsius": "Temperature of a GPU.",
    "allranks_gpu_slowed": "1 for each reason for which a GPU is slowed down.",
    "allranks_rank_steps": "Steps and batches of a rank since the attempt started, as ctx counts them.",
}


@click.command("metrics")
@click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=complete_run)
@click.option("-o", "--output", metavar="FILE", help="File to replace, for the node exporter: it ends with .prom.")
@folder_option
def command(names: tuple[str, ...], output: str | None, folder: str | None) -> int:
    """Write the state, steps, metrics and use of nodes of runs as OpenMetrics text, for Prometheus.

    RUN is by default the newest here that has not ended, or the newest if all have. With -o the text is in the older
    format of Prometheus, and the file is replaced at once, as the textfile collector of the node exporter needs both.
    """
    from allranks.launch.refresh import settled

    if output is not None and not output.endswith(".prom"):
        fix = "give it a name that ends with .prom"
        raise UsageError(f"-o {output}: the node exporter reads no such file", why="it reads *.prom", fix=fix)
    runs = find_each(folder, names) if names else [settled(find_unfinished(folder, None))]
    if output is None:
        render.data(to_text(runs).rstrip("\n"))
        return 0
    try:
        write_atomically(Path(output), to_text(runs, has_end=False), 0o644)  # The exporter is another user.
    except RunFolderError as error:
        raise AllranksError(error.what, why=error.why, fix="-o in a directory that you may write to") from error
    return 0


@dataclass(frozen=True)
class Sample:
    """A value of a metric, with its labels beside the run's."""

    name: str
    value: float | None
    labels: Mapping[str, object] = field(default_factory=dict)


def to_text(runs: Iterable[Run], *, has_end: bool = True) -> str:
    """Return all metrics of runs as OpenMetrics text.

    Raises:
        RunFolderError: the metrics of one cannot be read.
    """
    found: dict[str, list[str]] = {name: [] for name in HELP}
    for run in runs:
        for sample in _samples(run):
            if sample.value is not None:
                labeled = {"run": run.record.id, **sample.labels}
                labels = ",".join(f'{key}="{escaped(value)}"' for key, value in labeled.items())
                found[sample.name].append(f"{sample.name}{{{labels}}} {_number(sample.value)}\n")
    heads = {name: f"# TYPE {name} gauge\n# HELP {name} {HELP[name]}\n" for name in HELP if found[name]}
    return "".join(head + "".join(found[name]) for name, head in heads.items()) + END * has_end


def escaped(value: object) -> str:
    """Escape the value of a label; replace invalid UTF-8."""
    return str(value).encode(errors="replace").decode().translate(_ESCAPES)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _samples(run: Run) -> Iterator[Sample]:
    record, status = run.record, run.record.status
    yield Sample("allranks_run", 1, {"name": record.name, "cluster": record.cluster, "kind": record.kind})
    for state in State:
        yield Sample("allranks_run_state", status.state is state, {"state": state.value})
    yield Sample("allranks_run_attempt", run.attempt + 1)
    yield Sample("allranks_run_restarts", status.restarts)
    yield Sample("allranks_run_ranks", run.world_size)
    yield Sample("allranks_run_nodes", record.nnodes)
    yield Sample("allranks_run_created_timestamp_seconds", record.created)
    yield Sample("allranks_run_started_timestamp_seconds", status.started)
    yield Sample("allranks_run_ended_timestamp_seconds", status.ended)
    yield from _training(run)
    yield from _nodes(run)


def _training(run: Run) -> Iterator[Sample]:
    lines = read_metrics(run.folder, finite=False)
    last: dict[str, float] = {}
    for line in lines:
        last |= line.values
    if lines:
        yield Sample("allranks_run_step", lines[-1].step)
        yield Sample("allranks_run_steps_per_second", last.pop("steps_per_second", None) or _pace(lines))
    for name, value in last.items():
        yield Sample("allranks_run_metric", value, {"metric": name})
    saved = [save.step for save in read_saves(run.folder) if save.path]
    yield Sample("allranks_run_checkpoint_step", saved[-1] if saved else None)


def _pace(lines: list[MetricLine]) -> float | None:
    """Return the steps per second between the last two records, if they say."""
    if len(lines) < 2:
        return None
    steps, seconds = lines[-1].step - lines[-2].step, lines[-1].time - lines[-2].time
    return steps / seconds if steps > 0 and seconds > 0 else None


def _nodes(run: Run) -> Iterator[Sample]:
    for usage in node_usage(run.attempt_folder):
        node = {"node": usage["node"], "host": usage["host"]}
        yield Sample("allranks_node_cpus", usage["cpus"], node)
        yield Sample("allranks_node_memory_bytes", usage["memory"], node)
        for name, key in zip(("received", "sent", "read", "written"), TRAFFIC, strict=True):
            yield Sample(f"allranks_node_{name}_bytes_per_second", usage[key], node)
        yield Sample("allranks_node_sampled_timestamp_seconds", usage["time"], node)
        for gpu in usage["gpus"]:
            labels = {**node, "gpu": gpu["number"]}
            yield Sample("allranks_gpu_busy_ratio", gpu["busy"] / 100, labels)
            yield Sample("allranks_gpu_memory_bytes", gpu["memory"], labels)
            yield Sample("allranks_gpu_memory_total_bytes", gpu["total"], labels)
            yield Sample("allranks_gpu_clock_hertz", gpu["clock"] and gpu["clock"] * 1e6, labels)
            yield Sample("allranks_gpu_temperature_celsius", gpu["temperature"], labels)
            for reason in gpu["slowed_by"]:
                yield Sample("allranks_gpu_slowed", 1, {**labels, "reason": reason})
    for path in sorted(run.attempt_folder.glob(f"node-*/{contract.rank_step('*')}")):
        with suppress(OSError, struct.error):  # Just being made.
            (steps,) = struct.unpack("=Q", path.read_bytes()[:8])
            node_number = int(path.parent.name.removeprefix("node-"))
            rank = int(path.stem.removeprefix("rank-"))
            yield Sample("allranks_rank_steps", steps, {"node": node_number, "rank": rank})
