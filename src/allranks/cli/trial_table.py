"""How a trial is shown: a line for each part, and its ranks where they are few."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from allranks.cli import render
from allranks.job.units import format_size
from allranks.runs.trial import Who

if TYPE_CHECKING:
    from allranks.preflight.judged import Part
    from allranks.preflight.trials import Trial

#: Up to how many ranks, and links between them, each has a line of its own.
_FEW = 16


def show(trial: Trial, parts: Sequence[Part]) -> None:
    """Show all parts on stdout, and the ranks if they are few."""
    shown = [*_shown(parts)]
    rows = [(part.name, _result(part), *_figures(part)) for part in shown]
    if rows:
        lines = render.table(("what", "result", "time", "speed"), rows).splitlines()
        render.data("\n".join(_with_words(lines, shown)))
    who = trial.of(Who)
    if 0 < len(who) <= _FEW:
        render.data("\n" + _ranks(who))


def _shown(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield what has a line."""
    for are_links, group in groupby(parts, lambda part: part.kind == "link"):
        same = [part for part in group if part.kind != "ranks" or part.wrong]
        yield from _slowest(same) if are_links else same


def _slowest(links: Sequence[Part]) -> Sequence[Part]:
    """Return links; of many the slowest, and what the others are like together."""
    if len(links) <= _FEW:
        return links
    ordered = sorted(links, key=lambda part: float(part.figures["bandwidth"]))
    least, most = (_rate(ordered[place].figures["bandwidth"]) for place in (_FEW, -1))
    others = replace(links[0], kind="links", name=f"{len(links) - _FEW} others", figures={"what": f"{least} to {most}"})
    return [*ordered[:_FEW], others]


def _with_words(lines: Sequence[str], shown: Iterable[Part]) -> Iterator[str]:
    """Put under each line what is wrong, or why nothing was tried."""
    yield lines[0]
    for line, part in zip(lines[1:], shown, strict=True):
        yield line
        if words := part.wrong or part.why_not:
            yield f"  {words}"


def _result(part: Part) -> str:
    if part.wrong:
        return render.graded("FAIL", sys.stdout).replace("FAIL", "WRONG")
    return "skipped" if part.why_not else "right"


def _figures(part: Part) -> tuple[str, str]:
    """Return how long a part took, and how fast that is."""
    found = part.figures
    if part.kind == "bandwidth":
        speed = f"{_rate(found['algbw'])}, bus {_rate(found['busbw'])}"
        return _milliseconds(found["seconds"]), speed
    if part.kind == "link":
        return _milliseconds(found["bytes"] / found["bandwidth"]), _rate(found["bandwidth"])
    if part.kind == "training":
        first, last = found["losses"][0], found["losses"][-1]
        speed = f"{found['steps_per_second']:.0f} steps/s, loss {first:.3g} to {last:.3g} in {found['steps']} steps"
        return _milliseconds(1 / found["steps_per_second"]), speed
    return _milliseconds(found["seconds"]) if "seconds" in found else "", str(found.get("what", ""))


def _ranks(who: Sequence[Who]) -> str:
    rows = [
        (str(one.rank), one.host, str(one.node_rank), str(one.local_rank), _device(one), one.torch, one.backend)
        for one in who
    ]
    return render.table(("rank", "host", "node", "local rank", "device", "torch", "backend"), rows)


def _device(who: Who) -> str:
    return f"{who.device} {who.gpu}" if who.gpu else who.device


def _rate(amount: float) -> str:
    return f"{format_size(amount)}/s"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
