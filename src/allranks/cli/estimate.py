"""``allranks estimate``: memory, traffic and checkpoints of a job before it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from allranks.cli import render
from allranks.cli.options import JobCommand, Seconds, job_options, launch_of, load
from allranks.cli.runs import json_option
from allranks.errors import UsageError
from allranks.estimate import arithmetic
from allranks.estimate.arithmetic import DTYPES, OPTIMIZERS, SAME
from allranks.job.units import format_seconds, format_size, format_span, parse_memory, parse_number, parse_rate

if TYPE_CHECKING:
    from allranks.estimate.arithmetic import Needs, Pace, Row
    from allranks.estimate.network import Network
    from allranks.job.load import LoadedJob
    from allranks.launch.submit import Launch
    from allranks.record.estimate import MeasuredStep

T = TypeVar("T")
_NODES = "option_resources__nodes"
_DEFAULT_DISK = 1e9
#: Fewer parameters were meant to be millions or billions.
_FEWEST = 1000


class _Choice(click.Choice[str]):
    """Names of a table, in any case, and what PyTorch and other tools call the same."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__([*names], case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name in the table."""
        name = str(value).lower().removeprefix("torch.")
        return super().convert(SAME.get(name, value), param, ctx)


@click.command("estimate", cls=JobCommand)
@job_options
@click.option("--parameters", metavar="N", help="Number of parameters, such as 1.3B; nothing is run then.")
@click.option("--dtype", type=_Choice(DTYPES), default="fp32", help="Type of --parameters. Default: fp32.")
@click.option(
    "--optimizer", type=_Choice(OPTIMIZERS), default="adamw", help="Optimizer of --parameters. Default: adamw."
)
@click.option("--activations", metavar="SIZE", help="Activations of a rank, such as 8GB, instead of measured ones.")
@click.option(
    "--network",
    metavar="NAME|RATE",
    multiple=True,
    help="Network: 100GbE, HDR, NVLink4, ... or 12.5GB/s; may be given for nodes and for GPUs of a node.",
)
@click.option("--disk", metavar="RATE", help="Rate at which checkpoints are written. Default: 1GB/s.")
@click.option(
    "--compute",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="How long a rank computes in a step, with the batch of the first row.",
)
@click.option(
    "--price",
    metavar="PRICE",
    type=click.FloatRange(min=0),
    help="Price of a rank for an hour: for the cost; needs --compute.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Seconds(1),
    default=300,
    show_default=True,
    help="How long the script may take to its first step.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    parameters: str | None,
    dtype: str,
    optimizer: str,
    activations: str | None,
    network: tuple[str, ...],
    disk: str | None,
    compute: float | None,
    price: float | None,
    timeout: float,
    as_json: bool,
    **values: Any,
) -> int:
    """Estimate what a job needs: memory of each rank, traffic of each step, checkpoints.

    A script that uses allranks.init() makes one optimizer step here, as one rank on the CPU, with the batch
    that a rank of the job has. It leaves no run; allranks plan shows the result from then on. For other
    scripts, and models that this machine cannot hold, give numbers.

    \b
    allranks estimate job.yaml --nodes 1,2,4,8 --network 100GbE
    allranks estimate --parameters 1.3B --dtype bf16 --activations 8GB --nproc-per-node 8
    allranks estimate job.yaml --nodes 1,2,4,8 --network 100GbE --compute 0.35 --price 2.50

    With --nodes N,N,... there is a row for each number of nodes; default: up to eight times the job's.
    """
    from allranks.estimate.network import measured, named

    if price is not None and compute is None:
        fix = "--compute SECONDS: how long a rank computes in a step, as one GPU shows"
        raise UsageError("--price needs --compute", why="a step costs what it takes", fix=fix)
    held = _parsed("--activations", activations, _size)
    speed = _parsed("--disk", disk, parse_rate) or _DEFAULT_DISK
    count = _parsed("--parameters", parameters, parse_number)
    if count is not None and count < _FEWEST:
        why = f"a model of {count} parameters needs no estimate"
        raise UsageError(f"invalid --parameters: {parameters!r}", why=why, fix=f"write {count}B or {count}M")
    networks = [named(each) for each in network]
    if len([each for each in networks if each.place == "both"]) > 1:
        raise UsageError("--network: two rates", why="a rate is for any place", fix="name one: --network NVLink4")
    listed = _listed_nodes(values)
    loaded = load(ctx, values, needs_target=count is None)
    least, most = loaded.job.resources.nodes
    nodes = listed or ([least, most] if least < most else [most * factor for factor in (1, 2, 4, 8)])
    per_node, why = _ranks_per_node(loaded)
    step = None
    if count is None:
        step = _measure(loaded, nodes[0] * per_node, timeout)
        needs = arithmetic.from_step(step)
        if held is not None:
            needs = replace(needs, activations=held)
    else:
        needs = arithmetic.from_numbers(count, dtype, optimizer, held)
    networks = networks or [*measured(launch_of(loaded).runs_folder)]
    rows = arithmetic.rows(needs, nodes, per_node, networks)
    pace = arithmetic.paces(needs, rows, compute, price) if compute else [arithmetic.Pace()] * len(rows)
    if step is not None:
        _keep(launch_of(loaded), rows, "fsdp" if step.strategy == "fsdp" else "ddp")
    unknown = [*_unknown(needs, rows, step)]
    if compute and not any(each.step_seconds for each in pace):
        unknown.append("STEP, SPEED and COST: they need the time of the communication")
    if not compute:
        unknown.append("time of the computation, and so of a step, and its cost: --compute SECONDS, --price PRICE")
    if as_json:
        found = {
            "step": step and asdict(step),
            "needs": asdict(needs),
            "ranks_per_node": per_node,
            "disk": speed,
            "rows": [asdict(row) | asdict(own) for row, own in zip(rows, pace, strict=True)],
            "unknown": unknown,
        }
        render.as_json(found)
        return 0
    title = f"{parameters} parameters in {dtype}, {optimizer}"
    if step:
        title = f"{loaded.job.script or loaded.job.module}: one step of one rank on this CPU, {step.precision}"
    render.data(f"estimate for {title}\n\n{_parts(needs, step, speed, disk is None)}\n\n{_table(rows, pace)}\n")
    for note in (f"ranks per node: {per_node} ({why})", *_notes(rows, networks, pace)):
        render.data(f"note: {note}")
    for line in unknown:
        render.data(f"unknown: {line}")
    return 0


def _parsed(flag: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """Return the value of an option."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        raise UsageError(f"{flag}: {what}", fix=fix) from error


def _size(text: str) -> int:
    """Return the bytes in ``text``; memory for a scheduler may have no unit, which would be megabytes."""
    if text.strip().replace(".", "").isdigit():
        raise ValueError(f"invalid size: {text!r} has no unit; write {text.strip()}GB or {text.strip()}MB")
    return parse_memory(text, base=1000.0)


def _listed_nodes(values: dict[str, Any]) -> list[int]:
    """Take numbers of nodes such as ``1,2,4`` out of the options, which have one number; [] if it is not a list."""
    text = str(values.get(_NODES) or "")
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})+|\d{1,6}", text):
        return []
    values[_NODES] = None
    numbers = [int(each) for each in text.split(",")]
    if 0 in numbers:
        raise UsageError(f"--nodes: invalid number of nodes: {text!r}", fix="--nodes 1,2,4,8")
    return numbers


def _ranks_per_node(loaded: LoadedJob) -> tuple[int, str]:
    """Return the number of ranks on each node, and why; this machine counts where the job does not say."""
    from allranks.plan.layout import this_machine

    requested, gpus = loaded.job.launch.nproc_per_node, loaded.job.resources.gpus_per_node
    if isinstance(requested, int):
        return requested, "as asked"
    if requested != "cpu" and gpus is not None:
        return max(1, gpus), f"gpus_per_node is {gpus}"
    machine = this_machine(os.environ)
    if requested == "cpu":
        cpus = loaded.job.resources.cpus_per_node
        return (cpus, f"cpus_per_node is {cpus}") if cpus else (machine.cpus, "CPUs of this machine")
    return max(1, machine.gpus), f"{machine.gpus_from}; --nproc-per-node 8 for another"


def _measure(loaded: LoadedJob, ranks: int, timeout: float) -> MeasuredStep:
    from allranks.cli.live import Live
    from allranks.estimate.step import StepError, measure

    live = Live()
    live.show("making one step")
    try:
        return measure(launch_of(loaded), ranks, timeout)
    except StepError as error:
        live.wipe()
        for line in error.output.splitlines():
            render.talk(f"[0] {line}")
        raise
    finally:
        live.wipe()


def _keep(launch: Launch, rows: Sequence[Row], strategy: str) -> None:
    """Keep what a rank needs for later plans of the job."""
    from allranks.runs.estimate import Estimate, keep

    found = [
        Estimate(row.ranks, strategy, row.memory, row.sends)
        for row in rows
        if row.memory is not None and (row.strategy == strategy or row.ranks == 1)
    ]
    try:
        keep(launch.runs_folder, launch.command(), found)
    except OSError as error:
        render.talk(f"note: the estimate is not kept for allranks plan: {error.strerror}: {launch.runs_folder}")


def _parts(needs: Needs, step: MeasuredStep | None, speed: float, is_assumed: bool) -> str:
    """Return the table of what one rank holds that has all of the model."""
    state = f"{', '.join(step.optimizers)}" if step else ""
    is_measured = step is not None and needs.activations == step.activations
    held = "peak of forward and backward pass, the batch included" if is_measured else "as given"
    if step and step.recomputed:
        held += f"; recomputed in {', '.join(step.recomputed)}"
    disk = f"{format_size(speed)}/s{', assumed: --disk' if is_assumed else ''}"
    seconds = needs.checkpoint / speed
    rows = [
        ("parameters", needs.parameters, f"{needs.count:,}"),
        ("gradients", needs.gradients, f"{format_size(needs.sent)} are averaged over the ranks in a step"),
        ("optimizer state", needs.optimizer_state, state),
        ("buffers", needs.buffers, ""),
        ("activations", needs.activations, held if needs.activations is not None else "--activations SIZE"),
        ("checkpoint", needs.checkpoint, f"{(format_seconds if seconds >= 1 else format_span)(seconds)} at {disk}"),
    ]
    shown = [(name, "unknown" if size is None else format_size(size), why) for name, size, why in rows if size != 0]
    return render.table(("PART", "SIZE", "WHAT"), shown)


def _table(rows: Sequence[Row], pace: Sequence[Pace]) -> str:
    header = ["NODES", "RANKS", "STRATEGY", "MEMORY", "GPU", "SENDS", "TIME", "BATCH"]
    if any(each.step_seconds for each in pace):
        header += ["STEP", "SPEED"]
    if any(each.cost is not None for each in pace):
        header += ["COST"]
    cells = ([*_cells(row, own)][: len(header)] for row, own in zip(rows, pace, strict=True))
    return render.table(header, cells)


def _cells(row: Row, pace: Pace) -> Iterator[str]:
    yield from (str(row.nodes), str(row.ranks), row.strategy if row.ranks > 1 else "-")
    yield "unknown" if row.memory is None else format_size(row.memory)
    yield "-" if row.memory is None else f"{row.fits} GB" if row.fits else "none"
    yield format_size(row.sends)
    yield "unknown" if row.seconds is None else "-" if not row.sends else format_span(row.seconds)
    yield "unknown" if row.effective_batch is None else f"{row.effective_batch} ({row.ranks} x {row.rank_batch})"
    yield "unknown" if pace.step_seconds is None else format_span(pace.step_seconds)
    yield "unknown" if pace.speedup is None else f"{pace.speedup:.2f} x"
    yield "unknown" if pace.cost is None else f"{pace.cost:.2f}"


def _notes(rows: Sequence[Row], networks: Sequence[Network], pace: Sequence[Pace]) -> Iterator[str]:
    """Yield what the numbers assume."""
    yield "GPU: the smallest common one that holds it and 1 GiB for CUDA's context"
    used = {row.network for row in rows if row.sends}
    for network in (each for each in networks if each.name in used):
        place = {"within": "of a GPU", "between": "of all adapters of a node", "both": "as given"}[network.place]
        if network.curves:
            speed = f"up to {format_size(network.bandwidth)}/s each way, as measured for each size of messages"
        else:
            speed = f"{format_size(network.bandwidth)}/s each way, {place}"
        yield f"TIME by {network.name}: {speed}"
    if shared := [str(row.ranks) for row in rows if row.is_shared]:
        yield f"TIME of ddp on {shared[0]} ranks: gradients go through this machine's memory, not over the network"
    if any(row.seconds for row in rows):
        is_measured = all(network.curves for network in networks if network.name in used)
        why = "" if is_measured else "TIME is of that rate alone: real networks may be slower, and "
        yield f"{why}the backward pass hides a part of {'TIME' if is_measured else 'it'}"
    if uneven := sorted({row.ranks for row in rows if not row.divides}):
        yield f"the batch does not divide by {', '.join(map(str, uneven))} ranks: such a job is refused"
    if any(each.step_seconds for each in pace):
        yield "STEP is --compute in proportion to a rank's samples, and then TIME; where they overlap, it is shorter"
        yield "SPEED: samples per second, compared with the first row"
    if any(each.cost is not None for each in pace):
        yield "COST: of as many samples as 1,000 steps of the first row have"


def _unknown(needs: Needs, rows: Sequence[Row], step: MeasuredStep | None) -> Iterator[str]:
    """Yield what the estimate does not know, and what would tell it."""
    if needs.activations is None:
        yield "activations, and so memory: --activations SIZE"
    if any(row.seconds is None and row.nodes == 1 for row in rows):
        yield "time of the communication in a node: --network NVLink4, or allranks test on one node"
    if any(row.seconds is None and row.nodes > 1 for row in rows):
        yield "time of the communication between nodes: --network 100GbE, or allranks test on several nodes"
    if step is None:
        yield "effective batch, and activations with other batches: only a script with allranks.init() tells"
        if len({row.strategy for row in rows}) > 1:
            yield "what FSDP gathers at a time, which adds to its memory"
    elif step.batch is None:
        yield "batch: the script has a loader of its own, not ctx.loader(); activations are those of its first step"
