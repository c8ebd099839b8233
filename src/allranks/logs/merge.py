"""Merges the logs of all ranks of an attempt into one stream of lines, in order of arrival.

The order depends only on the nodes' indexes (``logindex``), so that following a run and reading it afterwards give the
same result. A line waits up to ``HOLD`` ms for the same line of another rank.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from allranks import contract
from allranks.logs.dedup import Dedup, LogBlock
from allranks.logs.lineform import UNKNOWN_ARRIVAL, LineForm, Prefixes
from allranks.logs.streams import AttemptLogs, LogStream
from allranks.record.logindex import KINDS, Growth

#: Equal lines are merged if they arrived within this many ms: a tick of the index, its jitter, and some clock skew.
HOLD = 75
#: Lines that arrived within this many ms of the oldest one are written with it, to limit the number of writes.
TOGETHER = 15
#: More pending bytes than this are written at once, to bound memory.
FLOOD = 4 << 20
#: Least and most bytes to read from each stream in turn in a flood. Pieces that do not fit into a core's cache are
#: merged three times slower.
_LEAST_SHARE = 1 << 16
_MOST_SHARE = 1 << 18
#: Least bytes to write at once: more costs memory, less costs calls.
_LEAST_WRITE = 1 << 18
#: Seconds between polls. With the index's ticks and the wait for equal lines, a line is delayed by about 0.1 s.
INTERVAL = 0.02

#: A function that writes bytes.
Sink: TypeAlias = Callable[[bytes], object]


class MergedLogs:
    """Merges the logs of an attempt into two sinks. Call ``pump`` while it runs, and ``finish`` when it has ended.

    Args:
        folder: the attempt's directory; nodes' directories and logs in it may appear later.
        out: takes the ranks' stdout. May be replaced between calls.
        err: takes the ranks' stderr. May be replaced between calls.
        ranks: global ranks to show; None for all.
        nodes: nodes to show; None for all.
        fold: show a line that several ranks wrote at the same time once.
        colour: colour the prefixes by rank.
        nnodes: number of nodes of the attempt, if known; else the number of directories.
        world_size: number of ranks of the attempt, if known. A line that all have written is then shown at once.
        form: which lines to show, and how; None: all, each with its prefix.
        keyboard: the rank that reads the terminal, if any: its unfinished line is a prompt.
        hurries: if the indexes have more new entries than this, read the growth of each log at once: faster, but lines
           are ordered only by these pieces. Of a piece of more than 256 kB only the end is read, which may start
           mid-line. None: all lines, in order of arrival.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        out: Sink,
        err: Sink,
        *,
        ranks: Collection[int] | None = None,
        nodes: Collection[int] | None = None,
        fold: bool = True,
        colour: bool = False,
        nnodes: int | None = None,
        world_size: int | None = None,
        form: LineForm | None = None,
        keyboard: int | None = None,
        hurries: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.err = err
        self._logs = AttemptLogs(folder, ranks, nodes)
        self._fold = fold and (ranks is None or len(ranks) > 1) and world_size != 1
        self._dedups = {kind: Dedup() for kind in KINDS}
        self._prefix = Prefixes(colour)
        self._form = form or LineForm()
        self._nnodes = nnodes
        self._everyone = world_size if nodes is None else None
        if ranks is not None:
            self._everyone = len(ranks)
        self._hurries = hurries
        self._clock = clock
        self._latest = 0
        self._latest_seen = 0.0
        self._pending_bytes = 0
        self._bar: LogStream | None = None
        self._keyboard = keyboard
        self._prompt: LogStream | None = None
        self._prompted = b""  # The shown part of the keyboard rank's line.

    def pump(self) -> None:
        """Write the lines that have arrived and need not wait; does not block."""
        self._discover()
        before = self._latest
        self._take(self._growths())
        if self._latest != before:
            self._latest_seen = self._clock()
        self._release(self._latest + int((self._clock() - self._latest_seen) * 1000))
        if self._everyone is not None:
            self._write({kind: dedup.common(self._everyone) for kind, dedup in self._dedups.items()})

    def finish(self) -> None:
        """Write everything left after the end of the run, including unfinished lines and bytes that no index has."""
        self._discover()
        self._take(self._growths())
        # The arrival of the rest is unknown; a user who followed the run has seen these lines before it.
        self._flush(UNKNOWN_ARRIVAL)
        self._take(iter(self._logs.unindexed(UNKNOWN_ARRIVAL)))
        for stream in self._logs.streams():
            self._accept(stream, UNKNOWN_ARRIVAL, stream.cutter.end())
            self._take_in(stream, UNKNOWN_ARRIVAL, stream.frames.end())
        self._flush(UNKNOWN_ARRIVAL)
        self._bar = None

    def transient(self) -> bytes | None:
        """Return the newest unfinished progress bar with its prefix, for the last line of a terminal.

        The sinks do not get it. Draw it after ``pump`` and erase it before the next call.
        """
        text = self._bar.cutter.progress() if self._bar else None
        return self._prefix((self._bar.source,)) + text if self._bar and text else None

    def prompt(self) -> bytes | None:
        """Return the unfinished line of the rank that reads the terminal, with its prefix, to be shown at once.

        Once the user has typed an answer, the sinks do not get the line, since it is on the screen already.
        """
        self._prompted = self._prompt.cutter.unfinished() if self._prompt else b""
        return self._prefix((self._prompt.source,)) + self._prompted if self._prompt and self._prompted else None

    def _discover(self) -> None:
        found = self._logs.discover()
        self._prefix.set_several_nodes((self._nnodes or found) > 1)

    def _growths(self) -> Iterator[Growth]:
        growths = self._logs.growths()
        if self._hurries is None:
            return growths
        few: list[Growth] = []
        last: dict[tuple[int, int, str], Growth] = {}
        for growth in growths:
            if len(few) <= self._hurries:
                few.append(growth)
            before = last.pop(key := (growth.node, growth.rank, growth.kind), growth)
            last[key] = growth._replace(restarted=True) if before.restarted else growth
        return iter(few if len(few) <= self._hurries else last.values())

    def _take(self, growths: Iterator[Growth]) -> None:
        # Nodes tick at different times: growths within a few ms of each other are read in turns.
        for _, group in groupby(growths, key=lambda growth: growth.time // TOGETHER):
            reads = list(group)
            if reads[0].time < UNKNOWN_ARRIVAL:
                self._release(reads[0].time)
                self._latest = max(self._latest, reads[-1].time)
            self._read_in_turns(reads)

    def _read_in_turns(self, reads: list[Growth]) -> None:
        share = min(max(FLOOD // len(reads), _LEAST_SHARE), _MOST_SHARE)
        left = []
        for growth in reads:
            if stream := self._logs.open(growth):
                if growth.restarted:
                    self._accept(stream, growth.time, stream.restart())
                if self._hurries is not None and growth.end - stream.at > share:
                    stream.skip_to(growth.end - share)
                left.append((growth, stream))
        while left:
            again = []
            for growth, stream in left:
                chunk = stream.read(growth.end, share)
                self._accept(stream, growth.time, self._feed(stream, chunk) if chunk else b"")
                if stream.cutter.progress():
                    self._bar = stream
                if chunk and stream.at < growth.end:
                    again.append((growth, stream))
            left = again
            if left or self._pending_bytes > FLOOD:
                self._flush(UNKNOWN_ARRIVAL)

    def _feed(self, stream: LogStream, chunk: bytes) -> bytes:
        """Return the newly complete lines, without one that was shown as a prompt and answered."""
        block = stream.cutter.feed(chunk)
        if stream.source.rank != self._keyboard:
            return block
        if stream is self._prompt and self._prompted and chunk.startswith(contract.TYPED):
            block = block.removeprefix(self._prompted + b"\n")
        if stream.cutter.unfinished():
            self._prompt = stream
        return block

    def _accept(self, stream: LogStream, arrival: int, block: bytes) -> None:
        """Take complete lines of a stream, and leave out the parts of tracebacks that are not shown."""
        if stream.kind == "e":
            # torch adds the rank to each line of a traceback. Our prefix shows it, and equal lines would differ.
            rank = b"[rank%d]: " % stream.source.rank
            if rank in block:
                block = (b"\n" + block).replace(b"\n" + rank, b"\n")[1:]
            if self._form.fold_frames:
                block = stream.frames.fold(block)
        self._take_in(stream, arrival, block)

    def _take_in(self, stream: LogStream, arrival: int, block: bytes) -> None:
        """Queue complete lines until equal lines of other ranks can arrive, or write them at once."""
        if not block:
            return
        if self._fold:
            self._pending_bytes += len(block)
            self._dedups[stream.kind].add(stream.source, arrival, block)
        else:
            parts = self._format(stream.kind, LogBlock(arrival, (stream.source,), block))
            (self.out if stream.kind == "o" else self.err)(b"".join(parts))

    def _release(self, now: int) -> None:
        """Write the lines that have waited long enough at time ``now`` of the index."""
        while ages := [age for dedup in self._dedups.values() if (age := dedup.oldest()) is not None]:
            if min(ages) + HOLD > now:
                return
            self._flush(min(ages) + TOGETHER)

    def _flush(self, until: float) -> None:
        self._write({kind: dedup.flush(until) for kind, dedup in self._dedups.items()})

    def _write(self, emitted: dict[str, list[LogBlock]]) -> None:
        """Write blocks of stdout and stderr, merged by arrival."""
        sinks: dict[str, Sink] = {"o": self.out, "e": self.err}
        tagged = ([(kind, block) for block in blocks] for kind, blocks in emitted.items())
        # At equal arrival stdout comes first: merge() is stable, and "o" is the first of KINDS.
        merged = heapq.merge(*tagged, key=lambda entry: entry[1].arrival)
        for kind, entries in groupby(merged, key=lambda entry: entry[0]):
            batch: list[bytes | memoryview] = []
            size = 0
            for _, block in entries:
                self._pending_bytes -= len(block.text) * len(block.sources)
                batch += self._format(kind, block)
                size += len(block.text)
                if size >= _LEAST_WRITE:
                    sinks[kind](b"".join(batch))
                    batch, size = [], 0
            sinks[kind](b"".join(batch))

    def _format(self, kind: str, block: LogBlock) -> Iterable[bytes | memoryview]:
        chosen = self._form.chosen(block.arrival, block.text)
        if not chosen:
            return ()
        if self._form.as_json:
            return self._form.objects(kind, block.sources, block.arrival, chosen)
        prefix = self._form.stamp(block.arrival) + self._prefix(block.sources)
        # In parts, so that the text is copied only once before it is written.
        return prefix, memoryview(chosen.replace(b"\n", b"\n" + prefix))[: -len(prefix)]


def follow(
    merged: MergedLogs,
    ended: Callable[[], bool],
    wait: Callable[[float], object],
    *,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Write the ranks' lines as they arrive; return when the run has ended and everything is written.

    ``wait`` may return early when the run ends. ``around`` calls each step passed to it, and may draw a progress bar.
    """
    step = around or (lambda action: action())
    while not ended():
        step(merged.pump)
        wait(INTERVAL)
    step(merged.finish)


class Tail:
    """Keeps the last lines of both sinks: pass ``out`` and ``err`` to a ``MergedLogs``, then call ``write``."""

    def __init__(self, lines: int) -> None:
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=lines)
        self.out: Sink = partial(self._keep, "o")
        self.err: Sink = partial(self._keep, "e")

    def write(self, out: Sink, err: Sink) -> None:
        """Write the kept lines, in their order, and forget them."""
        for kind, line in self._kept:
            (out if kind == "o" else err)(line + b"\n")
        self._kept.clear()

    def _keep(self, kind: str, data: bytes) -> None:
        if most := self._kept.maxlen:
            lines = data.rsplit(b"\n", most + 1)[-most - 1 : -1]
            self._kept.extend((kind, line) for line in lines)
