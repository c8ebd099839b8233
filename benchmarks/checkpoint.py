"""What a checkpoint of 1 GB costs the training: the loop's stall and the slowing of its steps until it is durable.

Measured in turn in one run: ours, a blocking ``torch.save`` with fsync, and ``async_save`` of
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import json
import os
import sys

from harness import ALLRANKS, PYTHON, call, report, workplace

#: Bytes of state beside the small model that is trained.
SIZE = int(os.environ.get("STATE_BYTES", 1 << 30))
ROUNDS = int(os.environ.get("ROUNDS", 5))

SCRIPT = """
import json, os, shutil, statistics, sys, time
import allranks, torch
from torch import distributed, nn
import torch.distributed.checkpoint as dcp

size, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), os.path.abspath("state")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
        self.table = nn.ParameterList(
            [nn.Parameter(torch.randn(size // 4 // 1024 // 16, 1024), requires_grad=False) for _ in range(16)])
    def forward(self, x):
        return self.body(x)

with allranks.init(seed=1) as ctx:
    torch.set_num_threads(max(1, os.cpu_count() // ctx.world_size))
    model = ctx.prepare(Net())
    optimizer = ctx.optimizer(torch.optim.Adam, model)
    inputs = torch.randn(256, 512)
    checkpoints = ctx.checkpoints(folder + "/ours", keep=1, model=model, optimizer=optimizer)
    bare = getattr(model, "module", model)
    others = distributed.new_group(backend="gloo")  # async_save sends messages from a thread of its own.

    def step():
        started = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
        return time.perf_counter() - started

    def steps(count):
        return [step() for _ in range(count)]

    def usual():
        steps(5)
        return statistics.median(steps(40))

    def until(durable):
        times = []
        while True:
            times += steps(4)
            if ctx.control.agree(int(not durable()))[0] == 0:
                return times

    def measure(save, durable):
        base = usual()
        ctx.barrier()
        started = time.perf_counter()
        done = save()
        stall = time.perf_counter() - started
        times = until(lambda: durable(done))
        taken = time.perf_counter() - started
        extra = sum(times) - base * len(times)
        return {"cost": stall + extra, "durable": taken, "stall": stall, "slowing": extra}

    def blocking():
        if ctx.is_main:
            state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
            with open(folder + "/blocking.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        ctx.barrier()

    def theirs():
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
        return dcp.async_save(state, checkpoint_id=folder + "/dcp", process_group=others)

    def kept(name):
        if ctx.is_main:
            shutil.rmtree(folder + "/" + name, ignore_errors=True)
        ctx.barrier()

    subjects = {
        "ours": (checkpoints.save, lambda _: not checkpoints._saver.save),
        "blocking": (blocking, lambda _: True),
        "dcp": (theirs, lambda future: future.done()),
    }
    usual()
    results = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, (save, durable) in subjects.items():
            kept(name if name == "dcp" else "none")
            taken = measure(save, durable)
            if number:
                results[name].append(taken)
    if ctx.is_main:
        medians = {name: {key: statistics.median(one[key] for one in some) for key in some[0]}
                   for name, some in results.items()}
        json.dump(medians, open("result.json", "w"))
"""


def main() -> None:
    for ranks in (1, 2):
        with workplace(script=SCRIPT) as folder:
            (folder / "state").mkdir()
            arguments = ["script.py", str(SIZE), str(ROUNDS)]
            if ranks == 1:
                command = [PYTHON, *arguments]
            else:
                options = ["--nproc-per-node", str(ranks)]
                command = [*ALLRANKS, "run", *options, arguments[0], "--", *arguments[1:]]
            done = call(command, folder, timeout=1200)
            if done.returncode:
                sys.exit(done.stderr.decode(errors="replace"))
            show(ranks, json.loads((folder / "result.json").read_text()))


def show(ranks: int, found: dict[str, dict[str, float]]) -> None:
    who = f"{ranks} rank{'s' * (ranks > 1)}"
    ours, blocking, dcp = found["ours"], found["blocking"], found["dcp"]
    print(f"{who}: " + "; ".join(f"{name} {values['stall']:.3f} + {values['slowing']:.3f} s, durable after "
          f"{values['durable']:.2f} s" for name, values in found.items()))  # fmt: skip
    report(f"{who}: stall and slowing / blocking save", ours["cost"], blocking["cost"], "s", "<= 0.25")
    report(f"{who}: stall and slowing / async_save", ours["cost"], dcp["cost"], "s", "<= 1")
    report(f"{who}: durable / blocking save", ours["durable"], blocking["durable"], "s", "<= 2")


if __name__ == "__main__":
    main()
