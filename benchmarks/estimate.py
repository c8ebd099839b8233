"""What ``allranks estimate`` says of the recipes, against their real training on gloo ranks.

Memory: the parameters, optimizer state and, where ranks keep them from step to step, gradients that rank 0 holds, and
the peak of torch's CPU allocator in two later steps, as its profiler reports it. Traffic: bytes that rank 0 gives to
the collectives of gradients and parameters in one step, times what a ring sends of each. Time: that of the collectives
of one step by themselves, each as in the training, against what the estimate makes of an ``allranks test`` just before,
in turn; the median of the ratios counts. Bars: memory within 15 %, bytes equal, time within 30 %.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from harness import ALLRANKS, checked

RECIPES = Path(__file__).parents[1] / "recipes"
#: Recipe, arguments of its script, ranks, strategy.
CASES = (
    ("mnist", [], 1, "ddp"),
    ("mnist", ["--checkpoint-activations"], 1, "ddp"),
    ("language-model", ["--strategy", "ddp"], 1, "ddp"),
    ("language-model", ["--strategy", "ddp", "--checkpoint-activations", "--layers", "6"], 1, "ddp"),
    ("language-model", ["--strategy", "ddp", "--width", "256"], 2, "ddp"),
    ("language-model", ["--strategy", "fsdp", "--width", "256", "--layers", "6"], 2, "fsdp"),
    ("reid", [], 1, "ddp"),
    ("reid", [], 2, "ddp"),
)
ROUNDS = 5
#: Runs the recipe's script from its third step on under torch's profiler, prints what rank 0 used, and ends.
MEASURED = """\
import json, os, runpy, sys, time
import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from allranks.runtime.model.allreduce import Message, SharedMessage
from allranks.runtime.model.flat_gradients import Flat
from allranks.runtime.model.wrappers import Buckets

sys.path.insert(0, os.getcwd())
operations = []  # What the second step, before memory is profiled, has sent: functions that send as much again.
steps, sent, models, profiler = 0, 0, [], profile(activities=[ProfilerActivity.CPU], profile_memory=True)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def size(tensors):
    return sum(local(each).numel() * each.element_size() for each in tensors if torch.is_tensor(each))

def count(tensor, factor):
    global sent
    sent += round(tensor.numel() * tensor.element_size() * factor) * (steps == 2)

def average(_, bucket):
    ranks = distributed.get_world_size()
    count(bucket.buffer(), 2 * (ranks - 1) / ranks)
    if steps == 1:
        copy = bucket.buffer().clone()
        operations.append(lambda: distributed.all_reduce(copy))
    work = distributed.all_reduce(bucket.buffer().div_(ranks), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

def counted(name, factor):  # What FSDP gives to a collective is its second argument.
    call = getattr(distributed, name, None)
    def instead(*args, **named):
        given = args[1] if len(args) > 1 else named.get("input_tensor", named.get("input"))
        count(given, factor(distributed.get_world_size()))
        if steps == 1:
            tensors = [each.clone() for each in (*args, *named.values()) if torch.is_tensor(each)]
            operations.append(lambda: call(*tensors))
        return call(*args, **named)
    if call:
        setattr(distributed, name, instead)

def noted(kind, made):
    def instead(self, *args, **named):
        made(self, *args, **named)
        models.append(self)
        if kind is Buckets:
            self.register_comm_hook(None, average)
    return instead

def send(self):
    ranks = distributed.get_world_size()
    count(self._sent, 2 * (ranks - 1) / ranks)
    if steps == 1:
        copy = self._sent.clone()
        operations.append(lambda: distributed.all_reduce(copy))
    message_send(self)

def share(self):
    count(self._results[0].new_empty(sum(each.numel() for each in self._results)), 1)
    if steps == 1:
        operations.append(lambda: (shared_send(self), self.receive()))
    shared_send(self)

for kind in (Flat, Buckets):
    kind.__init__ = noted(kind, kind.__init__)
message_send, Message.send = Message.send, send
shared_send, SharedMessage.send = SharedMessage.send, share
for name in ("all_gather_single", "all_gather_into_tensor"):  # That of torch 2.13, and of earlier ones.
    counted(name, lambda ranks: ranks - 1)
for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
    counted(name, lambda ranks: (ranks - 1) / ranks)

def time_of_all():
    if distributed.get_world_size() == 1:
        return 0.0
    times = []
    with torch.no_grad():
        for _ in range(101):
            distributed.barrier()
            began = time.perf_counter()
            for operation in operations:
                operation()
            times.append(time.perf_counter() - began)
    distributed.barrier()
    return sorted(times)[50]

def after(optimizer, *_):
    global steps
    steps += 1
    if steps == 2:
        profiler.__enter__()
    if steps == 4:
        profiler.__exit__(None, None, None)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        state = [each for entry in optimizer.state.values() for each in entry.values()]
        gradients = [each.grad for each in held if each.grad is not None] if models else []
        now = peak = 0
        events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
        for event in sorted(events, key=lambda each: each.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        seconds = time_of_all()
        if os.environ["RANK"] == "0":
            whole = size(held) + size(state) + size(gradients) + peak
            print("MEASURED", json.dumps({"memory": whole, "sent": sent, "seconds": seconds}), flush=True)
        os._exit(0)

register_optimizer_step_post_hook(after)
runpy.run_path("train.py", run_name="__main__")
"""


def main() -> None:
    for recipe, args, ranks, strategy in CASES:
        name = " ".join([recipe, *args, f"on {ranks} ranks"])
        with tempfile.TemporaryDirectory(prefix="allranks-bench-") as made:
            folder = Path(shutil.copytree(RECIPES / recipe, Path(made, recipe)))
            (folder / "measured.py").write_text(MEASURED)
            rounds = [one_round(folder, args, ranks, strategy) for _ in range(ROUNDS if ranks > 1 else 1)]
        row, real = rounds[-1]
        ratio = row["memory"] / real["memory"]
        print(f"{name}: memory {row['memory']:,} bytes, real {real['memory']:,}: {ratio:.3f} (bar: 0.85 to 1.15)")
        if ranks > 1:
            print(f"{name}: sends {row['sends']:,} bytes, real {real['sent']:,} (bar: equal)")
            ratios = [row["seconds"] / real["seconds"] for row, real in rounds]
            listed = ", ".join(f"{each:.2f}" for each in sorted(ratios))
            print(
                f"{name}: takes {row['seconds']:.3g} s, real {real['seconds']:.3g} s; estimate / real: "
                f"{statistics.median(ratios):.2f} of {listed} (bar: 0.7 to 1.3)",
                flush=True,
            )


def one_round(folder: Path, args: list[str], ranks: int, strategy: str) -> tuple[dict[str, float], dict[str, float]]:
    """Test the network, estimate, and train; return the estimate's row and what was measured."""
    job = ["--nproc-per-node", str(ranks), "--", *args]
    if ranks > 1:
        checked([*ALLRANKS, "test", "--nproc-per-node", str(ranks)], folder)
    done = checked([*ALLRANKS, "estimate", "train.py", "--nodes", "1", "--json", *job], folder)
    row = next(row for row in json.loads(done.stdout)["rows"] if row["strategy"] == strategy)
    done = checked([*ALLRANKS, "run", "--no-check", "measured.py", *job], folder)
    line = next(line for line in done.stdout.decode().splitlines() if "MEASURED" in line)
    return row, json.loads(line.partition("MEASURED ")[2])


if __name__ == "__main__":
    sys.exit(main())
