"""Parts of a screen as text: bars, sparklines, heat maps, columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.text import Text

_EIGHTHS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
#: No value.
_NONE = "·"
#: Control characters: ECMA-48, the C0 and C1 sets.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def flow(parts: Iterable[Text | str], width: int) -> list[Text]:
    """Arrange parts side by side in lines of ``width``; cut parts that are longer than a line."""
    lines = list[Text]()
    for part in parts:
        piece = Text(part) if isinstance(part, str) else part
        if not piece.plain:
            continue
        if lines and lines[-1].cell_len + 2 + piece.cell_len <= width:
            lines[-1].append("  ").append_text(piece)
        else:
            lines.append(piece.copy())
    return [cut(line, width) for line in lines]


def cut(line: Text, width: int) -> Text:
    """Cut a line to a width, and replace control characters by dots, since texts come from outside."""
    line.plain = _CONTROL.sub(_NONE, line.plain)
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def columns(rows: Sequence[Sequence[Text | str]], width: int) -> list[Text]:
    """Align rows of cells in columns, and cut them to a width; rows may have different numbers of cells."""
    most = max(map(len, rows), default=0)
    filled = [[*row, *[""] * (most - len(row))] for row in rows]
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in filled]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        line = Text()
        for cell, wide in zip(row, widths, strict=True):
            if wide:
                line.append(" " * 2 if line.plain else "").append_text(cell).append(" " * (wide - cell.cell_len))
        line.rstrip()
        lines.append(cut(line, width))
    return lines


def bar(share: float, width: int) -> str:
    """Draw a share from 0 to 1 as a bar."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_PARTS[rest] if rest else "")).ljust(width, "░")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve with ``width`` characters, scaled from its minimum to its maximum."""
    if width <= 0 or not values:
        return ""
    parts = min(width, len(values))
    bounds = [len(values) * part // parts for part in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    least, span = min(means), max(means) - min(means)
    return "".join(_EIGHTHS[round((mean - least) / span * 7) if 0 < span < math.inf else 3] for mean in means)


def heat(shares: Sequence[float | None]) -> Text:
    """Draw a cell for each share from 0 to 1, taller and brighter for larger ones; a dot for None."""
    text = Text()
    for share in shares:
        if share is None or not math.isfinite(share):
            text.append(_NONE, "dim")
            continue
        eighth = min(7, max(0, round(share * 7)))
        text.append(_EIGHTHS[eighth], ("blue", "blue", "cyan", "cyan", "cyan", "green", "green", "green")[eighth])
    return text
