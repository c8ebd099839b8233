"""How often a straggler is named: of a thousand quiet simulated runs, of 200 with a slow rank, and of real trainings.

The bars are 0, and 95 % with the right rank for the right reason. Where the seconds went is printed behind it. The real
trainings, of two ranks on a CPU each, are slow by injection: a process steals the CPU of one, or its data comes 40 ms
late, or nothing does. ``--real N``: so many of each (0: none). They take 15 s each on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import ALLRANKS, checked, workplace

from allranks.runs.record import load
from allranks.runs.steptime import of_start, read
from allranks.runs.stragglers import Straggler, find

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit" / "runs"))

from simulated_steps import missed, named_in_quiet

QUIET, SLOW = 1000, 200
#: A tenth of the windows of two seconds, so that a trial needs a tenth of the time.
WAITS = "0.1"
TRAINING = """\
import os, subprocess, sys, time
import torch
import allranks

kind, odd = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
torch.set_num_threads(1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.04 if kind == "data" and rank == odd else 0.0)
        return torch.ones(256, 256)


with allranks.init(backend="gloo", log_every=0) as ctx:
    model = ctx.prepare(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12))))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=1e-6)
    thief = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if kind == "cpu" and rank == odd else None
    end = time.monotonic() + 9
    for batch in ctx.loader(Samples(), batch_size=1, workers=0, quiet=True):
        ctx.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if ctx.progress.step % 50 == 0 and ctx.control.agree(time.monotonic() > end)[0]:
            break
    if thief:
        thief.kill()
"""


def is_right(kind: str, odd: int, found: Sequence[Straggler]) -> bool:
    """Return whether what is named is what was injected."""
    causes = {"cpu": ("compute", True), "data": ("data", False)}
    named = [(one.ranks, (one.phase, one.queued > 0)) for one in found]
    return named == ([((odd,), causes[kind])] if kind in causes else [])


def train(kind: str, odd: int, folder: Path) -> list[Straggler]:
    """Return the stragglers of a real training."""
    command = [*ALLRANKS, "run", "train.py", "--nproc-per-node", "2", "--no-check", "--", kind, str(odd)]
    checked(command, folder, timeout=300, _ALLRANKS_WAITS=WAITS)
    return find(of_start(read(load((folder / "runs" / "latest").resolve()).attempt_folder)))


def simulate() -> None:
    """Print how often simulated stragglers are named, and others."""
    began = time.process_time()
    named = list(named_in_quiet(range(QUIET)))
    print(f"quiet runs in which a rank was named: {len(named)} of {QUIET} (bar: 0) {named}")
    right = SLOW - len(list(missed(range(SLOW))))
    print(f"slow ranks that were named for the right reason: {right} of {SLOW}, {right / SLOW:.1%} (bar: 95 %)")
    print(f"{time.process_time() - began:.1f} s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, default=3, metavar="N")
    trials = parser.parse_args().real
    simulate()
    for kind, bar in (("cpu", "95 %"), ("data", "95 %"), ("quiet", "no rank named in any")) if trials else ():
        right = 0
        with workplace(train=TRAINING) as folder:
            for number in range(trials):
                odd = random.Random(number).randrange(2)
                found = train(kind, odd, folder)
                right += is_right(kind, odd, found)
                if not is_right(kind, odd, found):
                    print(f"  {kind}, rank {odd}: {[one.sentence for one in found]}")
        print(f"real trainings, {kind}: {right} of {trials} right (bar: {bar})", flush=True)


if __name__ == "__main__":
    main()
