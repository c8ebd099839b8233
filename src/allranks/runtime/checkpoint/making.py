"""What ``ctx.checkpoints`` was asked for, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.errors import RankError
from allranks.runtime.checkpoint import parts as kinds
from allranks.runtime.checkpoint.checkpointer import Checkpointer
from allranks.runtime.checkpoint.schedule import parse_every, parse_time

if TYPE_CHECKING:
    from allranks.runtime.context import Context


def make_checkpointer(
    ctx: Context,
    folder: str | Path,
    *,
    keep: int = 3,
    best: str | None = None,
    every: int | str | None = None,
    resume: bool = True,
    config: dict[str, Any] | None = None,
    background: bool = True,
    leave_before: str = "1min",
    save_at_end: bool = True,
    parts: dict[str, Any],
) -> Checkpointer:
    """Make what :meth:`Context.checkpoints` gives; see there."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise RankError(f"keep={keep!r}: at least one checkpoint has to stay", fix="keep=3")
    _refuse_second(ctx)
    made = Checkpointer(
        ctx,
        Path(folder),
        keep=keep,
        best=_parse_best(best),
        every=parse_every(every),
        config=_plain(config or {}),
        background=background,
        leave_before=parse_time("leave_before", leave_before),
        save_at_end=save_at_end,
        own=kinds.of_script(parts),
    )
    if resume:
        made.resume()
    else:
        made.begin_anew()
    ctx.closing.append(made.close)
    return made


def _refuse_second(ctx: Context) -> None:
    """Check that no other checkpointer of the context is at work.

    Raises:
        RankError: one is.
    """
    others = [getattr(close, "__self__", None) for close in ctx.closing]
    there = next((other for other in others if isinstance(other, Checkpointer) and not other.closed), None)
    if there is not None:
        raise RankError(
            f"ctx.checkpoints() was called before in this context, for {there.folder}",
            why="two of them would count each step twice, and when the job is asked to stop, only one would save",
            fix="give one all parts, as many as there are, or close() the first one before",
        )


def _parse_best(best: str | None) -> tuple[str, str] | None:
    if best is None:
        return None
    name, _, mode = best.rpartition(":") if isinstance(best, str) else ("", "", "")
    if not name or mode not in ("min", "max"):
        raise RankError(f"best={best!r} does not say what is best", fix='write best="loss:min" or best="accuracy:max"')
    return name, mode


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Check that a config is plain JSON, so that it can be read without torch.

    Raises:
        RankError: it is not; it names the key.
    """
    for key, value in config.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as error:
            raise RankError(
                f"config[{key!r}] cannot be saved", why=str(error), fix="numbers, text, lists and dicts of them only"
            ) from error
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]
