"""Run a script as a rank and as a plain interpreter would, to compare the two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from meetings import Meeting

from allranks.record.spec import NodeSpec
from node_orders import NODE
from waiting import PATIENCE

HARNESS = Path(__file__).with_name("rank_harness.py")


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it said."""

    code: int | None
    out: str
    err: str


@dataclass
class RankRunner:
    """Starts ranks through the real fork server, without torch."""

    folder: Path
    env: dict[str, str]

    def __call__(self, *args: str, plain: bool = False, kind: str = "script", **options: Any) -> Ended:
        """Run one rank: script or module, and its arguments."""
        (ended,), _ = self.many(1, *args, plain=plain, kind=kind, **options)
        return ended

    def many(
        self, count: int, target: str, *args: str, plain: bool = False, kind: str = "script", **options: Any
    ) -> tuple[list[Ended], dict[str, Any]]:
        """Run ranks side by side from one fork server; return how each ended, and what the harness told."""
        starts = [
            {
                "local_rank": number,
                "variables": {"RANK": str(number)},
                "out": str(self.folder / f"rank-{number}.out"),
                "err": str(self.folder / f"rank-{number}.err"),
                "stacks": str(self.folder / f"rank-{number}.stacks"),
            }
            for number in range(count)
        ]
        node = NODE._replace(kind=kind, target=target, args=args, stop_timeout=2.0)
        run = {"starts": starts, "node": node.to_json(), "plain": plain}
        usual = {"preload": [], "open_files": 0, "signal": "", "clean": True, "abandoned": False}
        told = self._harness({**run, **usual, **options})
        return [self._ended(number, told) for number in range(count)], told

    def python(self, *args: str) -> Ended:
        """Run the same as a plain interpreter."""
        with open(self.folder / "plain.out", "wb") as out, open(self.folder / "plain.err", "wb") as err:
            code = subprocess.run(
                [sys.executable, *args],
                cwd=self.folder,
                env={**self.env, "RANK": "0"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=PATIENCE,
            ).returncode
        return Ended(code, self._text("plain.out"), self._text("plain.err"))

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def _harness(self, given: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(HARNESS)],
            input=json.dumps(given).encode(),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr.decode()
        told: dict[str, Any] = json.loads(done.stdout)
        return {**told, "stderr": done.stderr.decode()}

    def _ended(self, number: int, told: dict[str, Any]) -> Ended:
        code = told.get("codes", {}).get(str(number))
        return Ended(code, self._text(f"rank-{number}.out"), self._text(f"rank-{number}.err"))

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="backslashreplace") if path.is_file() else ""


@pytest.fixture
def rank(tmp_path: Path, allranks_env: dict[str, str]) -> RankRunner:
    """Give a runner of ranks in an empty directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    allranks_env.pop("PYTHONUNBUFFERED", None)
    return RankRunner(folder, allranks_env)


@pytest.fixture(params=["forked", "plain"])
def mode(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Give the options for each of the two ways to start a rank."""
    return {"plain": request.param == "plain"}


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    """Give what makes a coordinator for the orders of its node, which has torch 2.13.0 or another one."""
    meetings: list[Meeting] = []

    def make(spec: NodeSpec, **options: str | None) -> Meeting:
        meetings.append(Meeting(spec, **options))
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting.close()
