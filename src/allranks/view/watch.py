"""The screens of ``allranks watch`` as lines of text: one run, and several."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from allranks.job.units import format_count, format_number, format_seconds, format_size
from allranks.runs.metrics import SPEED
from allranks.runs.record import Run
from allranks.runs.status import State
from allranks.runs.usage import clock, traffic
from allranks.view.charts import bar, columns, cut, flow, heat, sparkline
from allranks.view.feed import Row, Rows, Snapshot
from allranks.view.selection import Choice

_STATES = {State.SUCCEEDED: "green", State.RUNNING: "blue"} | dict.fromkeys(
    (State.PENDING, State.CANCELLED, State.PREEMPTED, State.UNKNOWN), "yellow"
)
#: Samples of a node older than this are ignored, in seconds; there is one every 2 s.
_OLD = 30.0
#: Seconds without new data after which that is shown; a thousand ranks are read every few seconds.
_STALE = 20.0
#: Nodes that are named below a heat map.
_NAMED = 3
#: Cells of a bar or of a curve in the lines below the log, and of GPUs in a row.
_SMALL, _CURVE, _MOST_CELLS = 6, 12, 16
#: What slows GPUs down and is a fault of their cooling or power supply.
_FAULTS = {"thermal", "power brake", "hardware slowdown"}
_KEYS = ("q quit", "l log", "n nodes", "e events", "/ filter", "r rank", "s stacks", "c cancel")


def run_screen(shot: Snapshot, choice: Choice, width: int, height: int) -> list[Text]:
    """Return the lines of a screen that shows a run: as many as it has."""
    foot = _footer(shot, choice, width)
    head = _header(shot, width)[: max(1, height - len(foot) - 1)]
    room = height - len(head) - len(foot)
    match choice.pane:
        case "log":
            body = _log(shot, choice, width, room)
        case "nodes":
            body = _nodes(shot, choice, width, room)
        case "events":
            body = _events(shot, width, room, choice.top)
        case "answer":
            answer = [*choice.answer[choice.top :]]
            if len(answer) > room - 1:
                answer[room - 2 :] = [f"{len(answer) - room + 2} more lines: allranks stacks {shot.run.record.id}"]
            body = _section("answer", [Text(line) for line in answer], width, room)
        case _:
            body = _parts(shot, choice, width, room)
    lines = [*head, *body[:room]]
    lines += [Text()] * (height - len(lines) - len(foot))
    return [cut(line, width) for line in [*lines, *foot]][:height]


def runs_screen(shown: Rows, width: int, height: int) -> list[Text]:
    """Return the lines of a screen that lists runs: as many as it has."""
    are_narrow = width < 60
    table: list[Sequence[Text | str]] = []
    for number, row in enumerate(shown.rows, 1):
        status = row.run.record.status
        key = str(number) if number < 10 else ""
        speeds = "  ".join(_speed(name, value) for name, value in row.last.items() if name.endswith(SPEED))
        loss = f"loss {format_number(row.last['loss'])}" if "loss" in row.last else ""
        name = Text(row.run.record.id, "bold")
        state = Text(status.state.value, _STATES.get(status.state, "red"))
        if are_narrow:
            table.append((key, name, _where(row, is_brief=True), state, loss))
        else:
            why = row.problem or status.cause or status.reason or ""
            ranks = format_count(row.run.record.world_size, "rank")
            table.append((key, name, state, _where(row), loss, _took(row.run), ranks, speeds, why))
    is_part = len(shown.rows) < shown.total
    scroll = ["↑ ↓ PgUp PgDn scroll"] if is_part else []
    foot = flow(["1-9 open a run", *scroll, "q quit"] if table else ["q quit"], width)
    part = f"{shown.top + 1} to {shown.top + len(table)}" if is_part and table else ""
    title = flow([Text(format_count(shown.total, "run"), "bold"), part, time.strftime("%H:%M:%S")], width)
    body = columns(table, width) if table else [Text("no run here", "dim")]
    lines = [*title, *body][: height - len(foot)]
    lines += [Text()] * (height - len(lines) - len(foot))
    return [*lines, *foot][:height]


def _where(row: Row, *, is_brief: bool = False) -> str:
    """Return where a run is in its epochs, or else its step; in brief, what is asked for most."""
    if row.position is None:
        return f"step {row.step}" if row.step is not None else ""
    return str(row.position).rpartition(", ")[2] if is_brief else str(row.position)


def below_log(shot: Snapshot, width: int, most: int, first: Sequence[str] = ("loss",)) -> list[Text]:
    """Return what ``allranks run`` shows below the log, in so many lines at most: first what is asked for most.

    The metrics ``first`` come before all others but the step; the rest, in the order of the script, if there is room.
    """
    step, *others = _progress(shot) or [""]
    curves = {}
    for name, (value, points) in shot.metrics.items():
        if name in first or not (name.endswith(SPEED) or name == "epoch"):
            curves[name] = Text(f"{name} {_number(value)} ").append(sparkline(points, _CURVE), "cyan")
    chosen = [curves.pop(name) for name in first if name in curves]
    if curves and not chosen:
        chosen = [curves.pop(next(iter(curves)))]
    attempt, left = _attempt_and_left(shot)
    nodes = [node for node in shot.nodes if shot.time - node["time"] <= _OLD]
    used = _used(_together(nodes), _SMALL) if nodes else []
    used = used[2:] or used  # GPUs, or else CPUs and memory.
    delay = [cut(Text(shot.delay, "yellow"), width)] if shot.delay and most > 1 else []
    parts = [step, *chosen, *others, *used, attempt, left, *curves.values()]
    return [*flow(parts, width)[: most - len(delay)], *delay]


def _progress(shot: Snapshot) -> list[str]:
    """Return step, epoch, time left and speeds, by the last values of metrics, and the newest checkpoint."""
    step, position = shot.step, shot.position
    last = {name: value for name, (value, _) in shot.metrics.items()}
    if position is not None and step is None:
        step = position.step
    parts = [f"step {step}"] if step is not None else []
    if position is not None:
        parts.append(str(position))
    elif "epoch" in last:
        parts.append(f"epoch {last['epoch']:g}")
    parts += [_speed(name, value) for name, value in last.items() if name.endswith(SPEED)]
    if shot.saved:
        saved, when = shot.saved
        age = f", {format_seconds(max(0.0, shot.time - when))} ago" if when else ""
        parts.append(f"checkpoint at step {saved}{age}")
    return parts


def _attempt_and_left(shot: Snapshot) -> tuple[str, str]:
    """Return which attempt it is, unless it is the first, and for how long it may run, if that is known."""
    attempt = f"attempt {shot.attempt + 1}" if shot.attempt else ""
    return attempt, "" if shot.left is None else f"{format_seconds(shot.left)} left of the allocation"


def _speed(name: str, value: float) -> str:
    """Write a speed: ``31.4 steps/s``."""
    return f"{format_number(value)} {name.removesuffix(SPEED)}/s"


def _together(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several nodes as one."""
    names = ("cpus", "cpus_total", "memory", "memory_total")
    sums = {name: sum(node[name] or 0 for node in nodes) for name in names}
    return {**sums, "gpus": [gpu for node in nodes for gpu in node["gpus"]]}


def _header(shot: Snapshot, width: int) -> list[Text]:
    record, status = shot.run.record, shot.run.record.status
    native = "" if status.native in ("ended", "ranks running", status.state.value) else status.native
    attempt, left = _attempt_and_left(shot)
    restarts = format_count(status.restarts, "restart") if status.restarts else ""
    state = Text(status.state.value, f"bold {_STATES.get(status.state, 'red')}")
    code = f"exit code {status.exit_code}" if status.exit_code else ""
    first: list[Text | str] = [
        Text(record.id, "bold"),
        state,
        Text(native, "dim"),
        code,
        attempt,
        restarts,
        _took(shot.run),
        left,
    ]
    where = f"{format_count(record.world_size, 'rank')} on {format_count(record.nnodes, 'node')} of {record.cluster}"
    lines = [*flow(first, width), *flow([where, Text(shot.command, "dim")], width), *flow(_progress(shot), width)]
    stale = f"read {format_seconds(shot.age)} ago: a file server or the scheduler does not answer"
    problem = shot.problem or stale * (shot.age > _STALE and shot.lines is not None)
    for text in (shot.delay, *dict.fromkeys((status.cause, status.reason)), problem):
        lines += [cut(Text(line, "yellow"), width) for line in wrap(text or "", width, max_lines=2, placeholder="…")]
    return lines


def _took(run: Run) -> str:
    return "" if run.seconds is None else format_seconds(max(0.0, run.seconds))


def _footer(shot: Snapshot, choice: Choice, width: int) -> list[Text]:
    match choice.prompt:
        case "/":
            return [cut(Text(f"lines with: {choice.typed}▏ (Enter; Esc leaves it)", "bold"), width)]
        case "r":
            return [cut(Text(f"log of rank: {choice.typed}▏ (Enter; none: of all)", "bold"), width)]
        case "c":
            return [cut(Text(f"cancel {shot.run.record.id}? y/N", "bold yellow"), width)]
    if choice.note:
        return [cut(Text(choice.note, "yellow"), width)]
    keys = _KEYS[:-2] if shot.run.record.status.state.is_final else _KEYS
    is_plain = choice == Choice(several=choice.several)
    more = ["m map"] if choice.pane == "nodes" else []
    more += ["↑ ↓ scroll"] if choice.pane else []
    more += [] if is_plain and not choice.several else ["b back"]
    return flow([Text(key, "dim") for key in (*keys, *more)], width)


def _parts(shot: Snapshot, choice: Choice, width: int, room: int) -> list[Text]:
    """Return a section of each kind; the log gets the remaining lines."""
    parts = [
        *_metrics(shot, width, max(2, room // 3)),
        *_nodes(shot, choice, width, max(2, room // 4)),
        *_events(shot, width, max(2, room // 5)),
    ]
    return [*parts, *_log(shot, choice, width, room - len(parts))]


def _section(title: str, lines: Sequence[Text], width: int, room: int) -> list[Text]:
    """Return as many lines as fit, under a title."""
    if room < 1:
        return []
    rule = Text("── ", "dim").append(title, "bold").append(" ").append("─" * max(0, width - len(title) - 4), "dim")
    return [cut(rule, width), *lines[: room - 1]]


def _metrics(shot: Snapshot, width: int, room: int) -> list[Text]:
    names = sorted(shot.metrics, key=lambda name: (name.endswith(SPEED), name != "loss"))[: room - 1]
    if not names:
        return []
    rows: list[Sequence[Text | str]] = []
    numbers = [_number(shot.metrics[name][0]) for name in names]
    labels = [name.replace(SPEED, "/s") for name in names]
    space = width - max(map(len, labels)) - max(map(len, numbers)) - 4
    for name, label, number in zip(names, labels, numbers, strict=True):
        value, points = shot.metrics[name]
        style = "" if math.isfinite(value) else "bold red"
        rows.append((label, Text(number, style), Text(sparkline(points, min(space, 80)), "cyan")))
    return _section("metrics", columns(rows, width), width, room)


def _number(value: float) -> str:
    return format_number(value) if math.isfinite(value) else "not finite"


def _nodes(shot: Snapshot, choice: Choice, width: int, room: int) -> list[Text]:
    """Return a row for each node, or a heat map where there is no room for that many."""
    nodes = shot.nodes
    if not nodes:
        return []
    if choice.pane == "nodes" and choice.top and len(nodes) > room - 1:  # Else their heat map.
        first = max(0, min(choice.top - 1, len(nodes) - room + 1))
        part = nodes[first : first + room - 1]
        title = f"nodes {first + 1} to {first + len(part)} of {len(nodes)}"
        return _section(title, columns([_node(node, shot.time, width) for node in part], width), width, room)
    if len(nodes) <= room - 1:
        return _section("nodes", columns([_node(node, shot.time, width) for node in nodes], width), width, room)
    shares = [_shares(node, shot.time, choice.measure) for node in nodes]
    if choice.measure == "step time":  # As parts of the slowest rank's.
        longest = max((seconds for own in shot.own.values() for seconds in own), default=1.0)
        shares = [[seconds / longest for seconds in shot.own.get(node["node"], ())] or [None] for node in nodes]
    what, lines = _heat_map(nodes, shares, choice.measure, width, max(1, room - 2))
    order = sorted((mean, at) for at, each in enumerate(shares) if (mean := _mean(each)) is not None)
    # The idle ones are named, or those whose memory is nearly full.
    title, named = ("least:", order) if choice.measure == "use" else ("most:", order[::-1])
    lines += columns(
        [(title, *_node(nodes[at], shot.time, width)) for _, at in named[: min(_NAMED, room - 1 - len(lines))]], width
    )
    return _section(f"{len(nodes)} nodes: {what}", lines, width, room)


def _node(node: Mapping[str, Any], now: float, width: int) -> list[Text | str]:
    """Return the cells of a node: its name, CPUs, memory and GPUs."""
    long = 0 if width < 60 else min(12, width // 14)
    age = now - node["time"]
    seen = Text(f"seen {format_seconds(age)} ago", "yellow") if age > _OLD else ""
    return [f"{node['node']} {node['host']}", *_used(node, long), traffic(node), seen]


def _used(node: Mapping[str, Any], long: int) -> list[Text | str]:
    """Return the cells of CPUs, memory and GPUs, with bars of so many cells; GPUs share cells if there are many."""
    cells: list[Text | str] = [_gauge("CPU", round(node["cpus"], 1), node["cpus_total"], "{:g}".format, long)]
    cells.append(_gauge("MEM", node["memory"], node["memory_total"], format_size, long))
    gpus = node["gpus"]
    if gpus:
        busy = [gpu["busy"] / 100 for gpu in gpus]
        each = math.ceil(len(busy) / _MOST_CELLS)
        shares = [_mean(busy[at : at + each]) for at in range(0, len(busy), each)]
        used, total = sum(gpu["memory"] for gpu in gpus), sum(gpu["total"] for gpu in gpus)
        use = Text("GPU ").append_text(heat(shares)).append(f" {100 * sum(busy) / len(busy):.0f} %")
        slowest = min(gpus, key=lambda gpu: gpu["clock"] or math.inf)
        if text := clock(slowest):
            use.append(" ").append(text, "yellow" if _FAULTS.intersection(slowest["slowed_by"]) else "")
        cells.append(use)
        cells.append(_gauge("GPU MEM", used, total, format_size, 0))
    return cells


def _gauge(title: str, used: float, total: float | None, write: Any, long: int) -> Text:
    text = Text(f"{title} ")
    if total and long:
        text.append(bar(used / total, long), "green").append(" ")
    return text.append(write(used) + (f" of {write(total)}" if total else ""))


def _heat_map(
    nodes: Sequence[Mapping[str, Any]], found: Sequence[Sequence[float | None]], measure: str, width: int, rows: int
) -> tuple[str, list[Text]]:
    """Return what the cells are, and rows of cells: a GPU, else a node, else several nodes each."""
    by_node = [(node["node"], shares) for node, shares in zip(nodes, found, strict=True)]
    if measure == "step time":
        of = "ranks"
    elif any(node["gpus"] for node in nodes):
        of = "GPUs"
    else:
        of = "CPUs" if measure == "use" else "nodes"
    unit = f"{measure} of {of}"
    label = len(str(by_node[-1][0])) + 1
    space = max(1, width - label)
    most = max(len(shares) for _, shares in by_node)
    together = max(1, space // (most + 1))  # Nodes in a row, with a gap after each.
    if most > 1 and math.ceil(len(by_node) / together) <= rows:
        lines = []
        for at in range(0, len(by_node), together):
            line = Text(f"{by_node[at][0]:>{label - 1}} ", "dim")
            for number, (_, shares) in enumerate(by_node[at : at + together]):
                line.append(" " if number else "").append_text(heat(shares))
            lines.append(line)
        return f"{unit}, a cell each", lines
    means = [_mean(shares) for _, shares in by_node]
    each = math.ceil(len(means) / (space * rows))
    cells = [_mean(means[at : at + each]) for at in range(0, len(means), each)]
    lines = [
        Text(f"{by_node[at * each][0]:>{label - 1}} ", "dim").append_text(heat(cells[at : at + space]))
        for at in range(0, len(cells), space)
    ]
    return f"{unit}, a cell for {'each' if each == 1 else f'{each} nodes'}", lines


def _shares(node: Mapping[str, Any], now: float, measure: str) -> list[float | None]:
    """Return how busy or full each GPU of a node is, or else the node, as parts of 1; None if that is not known now."""
    if now - node["time"] > _OLD:
        return [None] * max(1, len(node["gpus"]))
    if node["gpus"] and measure == "use":
        return [gpu["busy"] / 100 for gpu in node["gpus"]]
    if measure == "temperature":
        return [gpu["temperature"] and gpu["temperature"] / 100 for gpu in node["gpus"]] or [None]
    if node["gpus"]:
        return [gpu["memory"] / gpu["total"] if gpu["total"] else None for gpu in node["gpus"]]
    used, total = ("cpus", "cpus_total") if measure == "use" else ("memory", "memory_total")
    return [node[used] / node[total] if node[total] else None]


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _events(shot: Snapshot, width: int, room: int, below: int = 0) -> list[Text]:
    if not shot.events or room < 2:
        return []
    end = max(len(shot.events) - below, min(room - 1, len(shot.events)))
    lines = [
        Text(time.strftime("%H:%M:%S ", time.localtime(when)), "dim").append(" ".join(text.split()))
        for when, text in shot.events[max(0, end - room + 1) : end]
    ]
    return _section("events", lines, width, room)


def _log(shot: Snapshot, choice: Choice, width: int, room: int) -> list[Text]:
    title = "log" if choice.rank is None else f"log of rank {choice.rank}"
    if choice.pattern:
        title += f": lines with {choice.pattern}"
    if room < 2:
        return []
    if shot.lines is None or shot.rank != choice.rank:
        return _section(title, [Text("reading the logs", "dim")], width, room)
    wanted = choice.pattern.casefold()
    shown = list[str]()
    below = choice.top if choice.pane == "log" else 0
    for line in reversed(shot.lines):
        if wanted in line.casefold():
            shown.append(line)
            if len(shown) == room - 1 + below:
                break
    shown = shown[max(0, min(below, len(shown) - room + 1)) :]
    if not shown:
        nothing = "no such line" if choice.pattern else "nothing has been printed"
        return _section(title, [Text(nothing, "dim")], width, room)
    return _section(title, [_line(line) for line in reversed(shown)], width, room)


def _line(line: str) -> Text:
    """Return a line of the log, with the prefix that names its ranks in colour."""
    prefix, bracket, rest = line.partition("] ")
    return Text(prefix + bracket, "cyan").append(rest, "default") if line.startswith("[") and bracket else Text(line)
