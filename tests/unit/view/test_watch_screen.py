"""The screens of allranks watch, as text."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.runs.record import Record, Run
from allranks.runs.status import State, Status
from allranks.runs.steptime import Position
from allranks.view.feed import Row, Rows, Snapshot
from allranks.view.selection import Choice, press
from allranks.view.watch import below_log, run_screen, runs_screen

#: 12:00:00, wherever the test runs.
NOON = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))
LOG = ["[0] epoch 1", "[0-3] loading", "[2] Traceback", "[2] ValueError: bad batch", "[1] done"]


def _run(status: Status, *, ranks: int = 4, nodes: int = 2) -> Run:
    record = Record(
        id="demo-1127-1200",
        name="demo",
        cluster="lab",
        kind="slurm",
        world_size=ranks,
        nnodes=nodes,
        created=NOON - 60,
        host="login",
        status=status,
        stop_timeout=30.0,
        file_mode=0o600,
    )
    return Run(Path("/nowhere/demo-1127-1200"), record)


def _gpu(
    busy: int, memory: float, clock: int | None = None, *slowed_by: str, heat: int | None = None
) -> dict[str, Any]:
    clocks = {"clock": clock, "max_clock": clock and 1980, "slowed_by": slowed_by, "temperature": heat}
    return {"busy": busy, "memory": memory, "total": 80e9, **clocks}


def _node(number: int, *gpus: int, cpus: float = 8.0) -> dict[str, object]:
    sample = {"node": number, "host": f"gpu{number}", "time": NOON - 2, "cpus": cpus, "memory": 2e9}
    found = [_gpu(busy, 40e9) for busy in gpus]
    return {**sample, "cpus_total": 16, "memory_total": 8e9, "gpus": found}


ENDED = Status(State.SUCCEEDED, "ended", started=NOON - 60, ended=NOON, restarts=1, exit_code=0)
SHOT = Snapshot(
    _run(ENDED),
    NOON,
    step=150,
    metrics={
        "accuracy": (0.9639, [0.1, 0.5, 0.9, 0.95]),
        "loss": (math.nan, [4.0, 3.0, 2.0, 1.0]),
        "samples_per_second": (1716.0, [1716.0, 1716.0]),
    },
    nodes=[_node(0, 97, 3), _node(1, 100, 50)],
    lines=LOG,
    events=[(NOON - 55, "attempt 1: 4 ranks started"), (NOON - 20, "rank 1 failed; restarting")],
    saved=(140, NOON - 12),
)


def _text(lines: list[object]) -> list[str]:
    return [str(line).rstrip() for line in lines]


def _shown(shot: Snapshot = SHOT, choice: Choice = Choice(), width: int = 80, height: int = 24) -> list[str]:  # noqa: B008
    return _text(run_screen(shot, choice, width, height))


def test_a_run_at_80_columns():
    assert _shown(height=21) == [
        "demo-1127-1200  SUCCEEDED  1 restart  1 min 0 s",
        "4 ranks on 2 nodes of lab",
        "step 150  1716 samples/s  checkpoint at step 140, 12.0 s ago",
        "── metrics ─────────────────────────────────────────────────────────────────────",
        "loss       not finite  █▆▃▁",
        "accuracy   0.9639      ▁▄██",
        "samples/s  1716        ▄▄",
        "── nodes ───────────────────────────────────────────────────────────────────────",
        "0 gpu0  CPU ██▌░░ 8 of 16  MEM █▎░░░ 2 GB of 8 GB  GPU █▁ 50 %  GPU MEM 80 GB o…",
        "1 gpu1  CPU ██▌░░ 8 of 16  MEM █▎░░░ 2 GB of 8 GB  GPU █▅ 75 %  GPU MEM 80 GB o…",
        "── events ──────────────────────────────────────────────────────────────────────",
        "11:59:05 attempt 1: 4 ranks started",
        "11:59:40 rank 1 failed; restarting",
        "── log ─────────────────────────────────────────────────────────────────────────",
        *LOG,
        "",
        "q quit  l log  n nodes  e events  / filter  r rank",
    ]


def test_a_run_at_40_columns():
    assert _shown(width=40, height=22) == [
        "demo-1127-1200  SUCCEEDED  1 restart",
        "1 min 0 s",
        "4 ranks on 2 nodes of lab",
        "step 150  1716 samples/s",
        "checkpoint at step 140, 12.0 s ago",
        "── metrics ─────────────────────────────",
        "loss       not finite  █▆▃▁",
        "accuracy   0.9639      ▁▄██",
        "samples/s  1716        ▄▄",
        "── nodes ───────────────────────────────",
        "0 gpu0  CPU 8 of 16  MEM 2 GB of 8 GB  …",
        "1 gpu1  CPU 8 of 16  MEM 2 GB of 8 GB  …",
        "── events ──────────────────────────────",
        "11:59:05 attempt 1: 4 ranks started",
        "11:59:40 rank 1 failed; restarting",
        "── log ─────────────────────────────────",
        *LOG[1:],
        "q quit  l log  n nodes  e events",
        "/ filter  r rank",
    ]


def test_a_wide_screen_has_longer_bars():
    row = next(line for line in _shown(width=120) if line.startswith("0 gpu0"))
    assert row == ("0 gpu0  CPU ████░░░░ 8 of 16  MEM ██░░░░░░ 2 GB of 8 GB  GPU █▁ 50 %  GPU MEM 80 GB of 160 GB")


def test_large_numbers_have_no_exponent():
    metrics = {"tokens_per_second": (35746.4, [35746.4]), "loss": (1e-5, [1e-5]), "flops": (1.5e12, [1.5e12])}
    shown = _shown(replace(SHOT, metrics=metrics, saved=None))
    assert shown[2] == "step 150  35,746 tokens/s"
    assert [line.split()[:2] for line in shown[4:7]] == [
        ["loss", "1e-05"],
        ["flops", "1.5e+12"],
        ["tokens/s", "35,746"],
    ]


def test_a_run_that_waits_shows_the_reason():
    status = Status(State.PENDING, "queued", reason="Priority: other jobs come first")
    shown = _shown(Snapshot(_run(status), NOON, left=90.0, problem="squeue gave no answer"))
    assert shown[0].startswith("demo-1127-1200  PENDING  queued  ")
    assert shown[0].endswith("  1 min 30 s left of the allocation")
    assert shown[2:4] == ["Priority: other jobs come first", "squeue gave no answer"]
    assert shown[4:6] == [f"── log {'─' * 73}", "reading the logs"]
    assert shown[-1] == "q quit  l log  n nodes  e events  / filter  r rank  s stacks  c cancel"


def test_lines_of_the_log_are_filtered():
    shown = _shown(choice=Choice(pane="log", pattern="BATCH"), height=8)
    assert shown[3:6] == [f"── log: lines with BATCH {'─' * 55}", "[2] ValueError: bad batch", ""]
    assert shown[-1].endswith("  b back")


@pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 3), (20, 10), (300, 100)], ids=str)
@pytest.mark.parametrize("pane", ["", "log", "nodes", "events", "answer"])
def test_any_screen_is_filled_and_no_line_is_wider(width: int, height: int, pane: str):
    lines = run_screen(SHOT, Choice(pane=pane, answer=["one"]), width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)


def test_a_thousand_gpus_are_cells_of_a_heat_map():
    nodes = [_node(number, *([100] * 8)) for number in range(127)] + [_node(127, *([10] * 8))]
    shot = replace(SHOT, run=_run(ENDED, ranks=1024, nodes=128), nodes=nodes)
    shown = _shown(shot, Choice(pane="nodes"))
    assert shown[3] == f"── 128 nodes: use of GPUs, a cell each {'─' * 41}"
    assert shown[4] == "  0 " + " ".join(["████████"] * 8)
    assert shown[19] == "120 " + " ".join(["████████"] * 7 + ["▂▂▂▂▂▂▂▂"])
    assert shown[20].startswith("least:  127 gpu127")
    assert shown[23].startswith("q quit")
    part = next(line for line in _shown(shot) if " nodes: " in line)
    assert part == f"── 128 nodes: use of GPUs, a cell for each {'─' * 37}"


def test_a_cell_is_several_nodes_where_there_are_very_many():
    nodes = [_node(number, 100 if number < 960 else 0) for number in range(1000)]
    shown = _shown(replace(SHOT, nodes=nodes), Choice(pane="nodes"), height=9)
    assert shown[3].startswith("── 1000 nodes: use of GPUs, a cell for 5 nodes ─")
    assert shown[4:7] == ["  0 " + "█" * 76, "380 " + "█" * 76, "760 " + "█" * 40 + "▁" * 8]
    assert shown[7].startswith("least:  960 gpu960 ")


def test_the_memory_of_gpus_is_another_heat_map():
    nodes = [_node(number, 100) for number in range(20)]
    nodes[7]["gpus"] = [_gpu(0, 80e9)]
    shown = _shown(replace(SHOT, nodes=nodes), press(Choice(), "m", 4, has_ended=True)[0], height=12)
    assert shown[3] == f"── 20 nodes: memory of GPUs, a cell for each {'─' * 35}"
    assert shown[4] == " 0 ▅▅▅▅▅▅▅█" + "▅" * 12
    assert shown[5].startswith("most:  7 gpu7 ")
    assert shown[-1].endswith("r rank  m map  ↑ ↓ scroll  b back")


def test_the_slowest_clock_of_a_node_and_what_keeps_it_low():
    nodes = [_node(0), _node(1)]
    nodes[0]["gpus"] = [_gpu(97, 40e9, 1755), _gpu(98, 40e9, 1110, "power cap", "thermal")]
    nodes[1]["gpus"] = [_gpu(97, 40e9, 1755), _gpu(98, 40e9, 1740, "power cap")]
    rows = [line for line in _shown(replace(SHOT, nodes=nodes), width=140) if " gpu" in line]
    assert [row.partition("GPU ")[2].partition("  GPU")[0].rstrip() for row in rows] == [
        "██ 98 % 1.11 GHz (power cap, thermal)",
        "██ 98 % 1.74 GHz (power cap)",
    ]


def test_a_wide_screen_shows_network_and_disk_and_a_node_whose_gpus_do_not_answer():
    rates = {"net_in": 1.2e9, "net_out": 5e6, "disk_read": 0, "disk_write": 3e5}
    nodes = [{**_node(0, 97), **rates}, {**_node(1), "net_in": None, "net_out": None}]
    first, second = (line for line in _shown(replace(SHOT, nodes=nodes), width=180) if " gpu" in line)
    assert first.endswith("GPU MEM 40 GB of 80 GB  NET ↓ 1.2 GB/s ↑ 5 MB/s  DISK ↓ 0 B/s ↑ 300 KB/s")
    assert second == "1 gpu1  CPU ██████░░░░░░ 8 of 16  MEM ███░░░░░░░░░ 2 GB of 8 GB"


def test_how_hot_gpus_are_is_a_third_heat_map():
    nodes = [_node(number) for number in range(20)]
    for number, node in enumerate(nodes):
        node["gpus"] = [_gpu(97, 40e9, heat=None if number == 3 else 90 if number == 7 else 45)]
    choice = Choice(pane="nodes", measure="temperature")
    shown = _shown(replace(SHOT, nodes=nodes), choice, height=12)
    assert shown[3] == f"── 20 nodes: temperature of GPUs, a cell for each {'─' * 30}"
    assert shown[4] == " 0 ▄▄▄·▄▄▄▇▄▄▄▄▄▄▄▄▄▄▄▄"
    assert shown[5].startswith("most:  7 gpu7 ")
    assert shown[-1].endswith("m map  ↑ ↓ scroll  b back")


def test_how_slow_ranks_are_is_a_fourth_heat_map():
    own = {node: [1.0, 2.0 if node == 7 else 1.0] for node in range(20) if node != 3}
    shot = replace(SHOT, nodes=[_node(number) for number in range(20)], own=own)
    shown = _shown(shot, Choice(pane="nodes", measure="step time"), height=12)
    assert shown[3] == f"── 20 nodes: step time of ranks, a cell each {'─' * 35}"
    assert shown[4] == " 0 ▅▅ ▅▅ ▅▅ · ▅▅ ▅▅ ▅▅ ▅█ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅ ▅▅"
    assert shown[5].startswith("most:  7 gpu7 ")


def test_a_run_of_which_nothing_is_read_says_so():
    assert "read 45.0 s ago: a file server or the scheduler does not answer" in _shown(replace(SHOT, age=45.0))


def test_an_old_sample_is_no_use():
    nodes = [{**_node(number), "time": NOON - 100 if number else NOON} for number in range(64)]
    shown = _shown(replace(SHOT, nodes=nodes), Choice(pane="nodes"), height=9)
    assert shown[4] == " 0 ▅" + "·" * 63


def test_several_runs():
    rows = [Row(SHOT.run, 150, {"loss": 0.25, "steps_per_second": 9.5}), Row(SHOT.run, None, {})]
    shown = _text(runs_screen(Rows(rows, 0, 2), 80, 6))
    assert shown[0].startswith("2 runs  ")
    assert shown[1:] == [
        "1  demo-1127-1200  SUCCEEDED  step 150  loss 0.25  1 min 0 s  4 ranks  9.5 step…",
        "2  demo-1127-1200  SUCCEEDED                       1 min 0 s  4 ranks",
        "",
        "",
        "1-9 open a run  q quit",
    ]
    assert (
        _text(runs_screen(Rows(rows, 0, 2), 40, 3))[1] == "1  demo-1127-1200  step 150  SUCCEEDED …"
    )  # The newest stays.


def test_of_several_runs_those_that_run_show_their_epoch_and_the_time_left():
    run = _run(Status(State.RUNNING, "ranks running", started=NOON - 60))
    rows = [
        Row(run, 100, {"loss": 0.25}, position=Position(146, 2, 8, 45, 720.0)),
        Row(run, None, {}, position=Position(14, 1, None, 7, None)),
    ]
    shown = _text(runs_screen(Rows(rows, 0, 2), 80, 4))
    assert shown[1].startswith("1  demo-1127-1200  RUNNING  epoch 2 of 8, 45 %, 12 min left  loss 0.25  ")
    assert shown[2].startswith("2  demo-1127-1200  RUNNING  epoch 1, 7 %                                ")
    shown = _text(runs_screen(Rows(rows, 0, 2), 50, 4))
    assert shown[1:3] == [
        "1  demo-1127-1200  12 min left  RUNNING  loss 0.25",
        "2  demo-1127-1200  7 %          RUNNING",
    ]


def test_of_more_runs_than_fit_a_part_is_shown():
    shown = _text(runs_screen(Rows([Row(SHOT.run, None, {})] * 2, 20, 200), 80, 4))
    assert shown[0].startswith("200 runs  21 to 22  ")
    assert shown[2].startswith("2  demo-1127-1200  ")
    assert shown[3] == "1-9 open a run  ↑ ↓ PgUp PgDn scroll  q quit"


UP, DOWN, PAGE_UP, PAGE_DOWN = "\x1b[A", "\x1bOB", "\x1b[5~", "\x1b[6~"


def _scrolled(pane: str, *keys: str, shot: Snapshot = SHOT, lines: int = 50) -> list[str]:
    choice = Choice(pane=pane)
    for key in keys:
        choice, _ = press(choice, key, 4, has_ended=False, page=5, lines=lines)
    return _shown(shot, choice, height=9)[4:8]


def test_nodes_that_do_not_fit_are_scrolled_through_from_their_heat_map():
    many = replace(SHOT, nodes=[_node(number) for number in range(50)])
    assert _shown(many, Choice(pane="nodes"), height=9)[3].startswith("── 50 nodes: use of CPUs")
    assert [line[:7] for line in _scrolled("nodes", DOWN, shot=many)] == ["0 gpu0 ", "1 gpu1 ", "2 gpu2 ", "3 gpu3 "]
    assert [line[:2] for line in _scrolled("nodes", DOWN, PAGE_DOWN, UP, shot=many)] == ["4 ", "5 ", "6 ", "7 "]
    assert _scrolled("nodes", *[PAGE_DOWN] * 99, shot=many)[-1].startswith("47 gpu47")


def test_log_and_events_are_scrolled_from_their_end():
    long = replace(SHOT, lines=[f"line {at}" for at in range(50)], events=[(NOON, f"event {at}") for at in range(50)])
    for pane in ("log", "events"):
        assert _last(_scrolled(pane, shot=long)) == [46, 47, 48, 49]
        assert _last(_scrolled(pane, UP, UP, DOWN, PAGE_UP, shot=long)) == [40, 41, 42, 43]
        assert _last(_scrolled(pane, *[PAGE_UP] * 99, shot=long)) == [1, 2, 3, 4]
        assert _last(_scrolled(pane, *[PAGE_UP] * 99, PAGE_DOWN, shot=long)) == [6, 7, 8, 9]


def _last(lines: list[str]) -> list[int]:
    return [int(line.split()[-1]) for line in lines]


def _pressed(keys: str, *, has_ended: bool = False, several: bool = False) -> tuple[Choice, list[str]]:
    choice, actions = Choice(several=several), list[str]()
    for key in keys:
        choice, action = press(choice, key, 4, has_ended=has_ended)
        actions += [action] if action else []
    return choice, actions


@pytest.mark.parametrize(
    ("keys", "choice", "actions"),
    [
        ("l", Choice(pane="log"), []),
        ("ll", Choice(), []),
        ("nb", Choice(), []),
        ("m", Choice(pane="nodes", measure="memory"), []),
        ("mm", Choice(pane="nodes", measure="temperature"), []),
        ("mmm", Choice(pane="nodes", measure="step time"), []),
        ("mmmm", Choice(pane="nodes"), []),
        ("/los\x7fss\n", Choice(pattern="loss"), []),
        ("/loss\n\x1b", Choice(), []),
        ("/q", Choice(prompt="/", typed="q"), []),
        ("rx3\n", Choice(pane="log", rank=3), []),
        ("r4\n", Choice(note="there is no rank 4: the run has 4, counted from 0"), []),
        ("r3\nr\n", Choice(pane="log"), []),
        ("s", Choice(note="waiting for the stacks of all ranks"), ["stacks"]),
        ("c", Choice(prompt="c"), []),
        ("cy", Choice(note="cancelling the run"), ["cancel"]),
        ("cn", Choice(note="not cancelled"), []),
        ("c\n", Choice(note="not cancelled"), []),
        ("q", Choice(), ["quit"]),
        ("b", Choice(), []),
    ],
)
def test_keys(keys: str, choice: Choice, actions: list[str]):
    assert _pressed(keys) == (choice, actions)


def test_keys_of_a_run_that_has_ended():
    for key in "sc":
        assert _pressed(key, has_ended=True) == (Choice(note="the run has ended"), [])


def test_the_way_back_to_several_runs():
    assert _pressed("lbb", several=True) == (Choice(several=True), ["back"])


def test_what_a_terminal_would_obey_is_shown_as_dots():
    status = Status(State.FAILED, "ended", cause="Error: \x1b[2J\x1b]52;c;AAAA\x07", exit_code=1)
    assert _shown(Snapshot(_run(status), NOON))[2] == "Error: ·[2J·]52;c;AAAA"  # rich drops BEL.
    odd = replace(SHOT, metrics={"lo\x1bss": (1e308, [-1.7e308, 1.7e308])})
    assert "lo·ss" in _shown(odd)[4]


def test_a_long_answer_says_how_much_more_there_is():
    shown = _shown(choice=Choice(pane="answer", answer=[f"line {number}" for number in range(50)]), height=10)
    (more,) = [line for line in shown if "more lines" in line]
    kept = [line for line in shown if line.startswith("line ")]
    assert more == f"{50 - len(kept)} more lines: allranks stacks demo-1127-1200"
    assert kept == [f"line {number}" for number in range(len(kept))]


def test_below_the_log_stands_what_is_asked_for_most_in_as_many_lines_as_there_are():
    shot = replace(SHOT, attempt=1, left=3720.0, delay="rank 1 on gpu0 waits for data for 200 steps")
    assert [line.plain for line in below_log(shot, 80, 3)] == [
        "step 150  loss not finite █▆▃▁  1716 samples/s",
        "checkpoint at step 140, 12.0 s ago  GPU █▁█▅ 62 %  GPU MEM 160 GB of 320 GB",
        "rank 1 on gpu0 waits for data for 200 steps",
    ]
    assert [line.plain for line in below_log(shot, 30, 3)] == [
        "step 150  loss not finite █▆▃▁",
        "1716 samples/s",
        "rank 1 on gpu0 waits for data…",
    ]
    assert below_log(shot, 80, 0) == []


def test_below_the_log_stands_where_the_training_is_also_without_metrics():
    shot = replace(SHOT, metrics={}, step=None, saved=None, nodes=[], position=Position(146, 2, 8, 45, 720.0))
    assert [line.plain for line in below_log(shot, 80, 3)] == ["step 146  epoch 2 of 8, 45 %, 12 min left"]
    shot = replace(shot, step=100, metrics={"epoch": (1.0, [0.0, 1.0])})
    assert [line.plain for line in below_log(shot, 80, 3)] == ["step 100  epoch 2 of 8, 45 %, 12 min left"]
    assert _shown(shot)[2] == "step 100  epoch 2 of 8, 45 %, 12 min left"


def test_below_the_log_an_old_sample_of_a_node_does_not_count():
    shot = replace(SHOT, metrics={}, step=None, saved=None, nodes=[{**_node(0), "time": NOON - 31}])
    assert below_log(shot, 80, 3) == []


def test_below_the_log_chosen_metrics_come_first():
    metrics = {
        "loss": (2.0, [2.0, 2.0]),
        "accuracy": (0.5, [0.0, 1.0]),
        "grad_norm": (1.0, [1.0]),
        "epoch": (1.0, [1.0]),
    }
    shot = replace(SHOT, metrics=metrics, step=7, saved=None, nodes=[])
    (line,) = below_log(shot, 100, 3, ("grad_norm", "accuracy", "missing"))
    assert line.plain == "step 7  grad_norm 1 ▄  accuracy 0.5 ▁█  epoch 1  loss 2 ▄▄"
    (line,) = below_log(shot, 100, 3)
    assert line.plain == "step 7  loss 2 ▄▄  epoch 1  accuracy 0.5 ▁█  grad_norm 1 ▄"
    (line,) = below_log(shot, 100, 3, ("missing",))
    assert line.plain == "step 7  loss 2 ▄▄  epoch 1  accuracy 0.5 ▁█  grad_norm 1 ▄", "the first that the script logs"
