"""Metrics: summed on each rank without waiting, averaged over all ranks when they are read, written by rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, float32

from allranks.errors import RankError
from allranks.runtime.call_errors import answering
from allranks.runtime.metrics.records import Records, named
from allranks.runtime.metrics.sums import Sums, Totals, means, merge

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Names that each record has.
_RESERVED = frozenset({"step", "time", "steps_per_second", "samples_per_second"})
#: Most calls of ``log`` whose numbers are held before they are summed.
_MOST = 1000


class _Numbers(dict[str, "list[float]"]):
    """Lists of numbers by name; ``__missing__`` saves a lookup in each step."""

    def __missing__(self, name: str) -> list[float]:
        _check_name(name)
        numbers: list[float] = []
        self[name] = numbers
        return numbers


class Metrics:
    """Logs values of a training, and averages them over samples and over all ranks. Use it as ``ctx.metrics``."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._rank = ctx.rank
        self._progress = ctx.progress
        self._totals = Totals(ctx)
        self._records = Records(ctx, self._totals)
        self._since_means: dict[str, Sums] = {}
        #: Logged and not merged yet: plain numbers of one common weight, and sums of all other values.
        self._numbers = _Numbers()
        self._weight: float = 1
        self._room = _MOST
        self._fresh: dict[str, Sums] = {}

    @answering
    def log(self, *, weight: float | Tensor | None = None, **values: float | Tensor) -> None:
        """Add values of this rank's current batch to the means. It sends nothing, and does not wait for a GPU.

        A tensor on a GPU is read later: do not modify it in place afterwards. Ranks need not all call it.

        Args:
            weight: weight of the values. Default: the number of samples of the loader's batch, which is 0 for a filler;
                1 without a loader. With weight 0 values are ignored, even NaN.
            values: numbers, or tensors of one number, with or without a gradient.

        Raises:
            RankError: a value is not a number, or the weight is negative.
        """
        if weight is None:
            weight = self._progress.samples
            if weight is None:
                weight = 1
        elif isinstance(weight, Tensor):
            if not weight.is_cpu:
                self._log_weighted(weight, values)
                return
            weight = weight.item()
        if not weight > 0:
            if weight != 0:
                raise RankError(f"invalid weight: weight={weight}", fix="give the number of samples, 0 or more")
            return
        if weight != self._weight or not self._room:
            self._fold()
            self._weight = weight
        self._room -= 1
        numbers = self._numbers
        name, value = "", None
        try:
            for name, value in values.items():
                # The exact type first, since this is the hot path; subclasses such as Parameter come below.
                if type(value) is Tensor and value.is_cpu:
                    number: object = value.tolist()  # Faster than item().
                    numbers[name].append(number if type(number) is float else _number(name, value))
                elif isinstance(value, Tensor) and not value.is_cpu:
                    _check_one(name, value)
                    self._sums(name).hold(value, weight)
                else:
                    numbers[name].append(value if type(value) is float else _number(name, value))
        except (TypeError, RuntimeError) as error:
            raise _no_number(name, value) from error

    def means(self) -> dict[str, float]:
        """Return the means of all values logged since the last call, over samples and over all ranks.

        All ranks call it at the same point and get the same result. It sends one message for all metrics, and does not
        change what is written every ``log_every`` steps.
        """
        self._merge()
        self.flush()
        (rows,) = self._totals.reduce(self._since_means)
        self._since_means = {}
        return means(self._totals.names, rows)

    @answering
    def record(self, **values: float | Tensor) -> None:
        """Write values of the current step unchanged, on rank 0; it does nothing on other ranks.

        Raises:
            RankError: a value is not a number, or a name is one that every record has.
        """
        if self._rank != 0:
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        for name in numbers:
            _check_name(name)
        self.write(self._progress.step, numbers)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write values of a step unchanged, on rank 0."""
        self._ctx._tracker_group.write(step, dict(values), time.time())

    def config(self, values: Mapping[str, object]) -> None:
        """Pass hyperparameters to the trackers that show them, on rank 0; it does nothing on other ranks."""
        if self._rank == 0:
            self._ctx._tracker_group.config(dict(values))

    def start_step(self) -> None:
        """Write the logged values if a record is due. All ranks call it before each forward pass.

        ``ctx.accumulate``, ``ctx.backward`` and ``optimizer.step`` do so.
        """
        records = self._records
        if self._progress.step >= records.next:
            self._merge()
            records.start()
        elif records.unwritten:
            records.poll()

    def resume(self, step: int) -> None:
        """Continue after ``step``: drop later records, since the training will write them again.

        :meth:`load_state_dict` calls it. A script that does not save the metrics calls it after loading.
        """
        self._records.resume(step)
        if self._rank == 0:
            self._ctx._tracker_group.resume(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the sums over all ranks so far; all ranks call it at the same point.

        With them the means of an epoch are right after a resume in mid-epoch, on any number of ranks.
        """
        # Write a record that is due at this step now: after a resume it would come twice, or with the next one.
        self.start_step()
        self._records.land()
        self.flush()
        self._merge()
        epoch, window = self._totals.reduce(self._since_means, self._records.window)
        names = self._totals.names
        return {"step": self._progress.step, "epoch": named(names, epoch), "window": named(names, window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, and :meth:`resume`; values logged before are dropped."""
        # They are sums over all ranks: only one rank loads them.
        held = state if self._rank == 0 else {"epoch": {}, "window": {}}
        self._numbers, self._fresh = _Numbers(), {}
        self.resume(state["step"])
        self._since_means = {name: Sums(*sums) for name, sums in held["epoch"].items()}
        self._records.window = {name: Sums(*sums) for name, sums in held["window"].items()}

    def flush(self) -> None:
        """Write all records so far to the file; otherwise those within a second wait for the next one."""
        if self._has_trackers():
            self._ctx._tracker_group.flush()

    def hand_over(self) -> None:
        """Hand the values not yet written to rank 0; all ranks call it before the end."""
        self._merge()
        self._records.hand_over()

    def finish(self) -> None:
        """Write the remaining values and close the trackers, after all ranks have handed over."""
        self._records.finish()
        if self._has_trackers():
            self._ctx._tracker_group.close()

    def _log_weighted(self, weight: Tensor, values: Mapping[str, float | Tensor]) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                _check_one(name, value)
            else:
                value = weight.new_full((), _number(name, value), dtype=float32)
            self._sums(name).hold(value.to(weight.device, non_blocking=True), weight)

    def _sums(self, name: str) -> Sums:
        if name not in self._fresh:
            _check_name(name)
            self._fresh[name] = Sums()
        return self._fresh[name]

    def _fold(self) -> None:
        """Sum the numbers of one common weight."""
        for name, numbers in self._numbers.items():
            if numbers:
                sums = self._sums(name)
                sums.total += sum(numbers) * self._weight
                sums.weight += len(numbers) * self._weight
                numbers.clear()
        self._room = _MOST

    def _merge(self) -> None:
        self._fold()
        fresh, self._fresh = self._fresh, {}
        merge(self._since_means, fresh)
        self._records.add(fresh)

    def _has_trackers(self) -> bool:
        """Return whether the trackers are open; the first record opens them, on rank 0."""
        return "_tracker_group" in vars(self._ctx)


def _number(name: str, value: Any) -> float:
    """Read a value, also from a GPU."""
    try:
        if isinstance(value, Tensor):
            return float(value.item())
        return float(value + 0.0)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_number(name, value) from error


def _check_one(name: str, value: Tensor) -> None:
    if value.numel() != 1 or value.is_complex():
        raise _no_number(name, value)


def _check_name(name: str) -> None:
    if name in _RESERVED:
        raise RankError(
            f"a metric cannot be named {name!r}", why="every record has a field of that name", fix="choose another name"
        )


def _no_number(name: str, value: object) -> RankError:
    if isinstance(value, Tensor):
        return RankError(
            f"metric {name} is a tensor of shape {tuple(value.shape)} and type {value.dtype}",
            why="a metric is one real number",
            fix=f"ctx.metrics.log({name}={name}.mean())",
        )
    return RankError(f"metric {name} is a {type(value).__name__}: {str(value)[:80]!r}", why="a metric is one number")
