"""A rank is killed to the first all-reduce of the next generation, 2 ranks over gloo: ours / torchrun.

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it most of its second generations fail or hang
over gloo, on keys of the first. Then: how many of 100 restarts of ours succeed.
"""

from __future__ import annotations

from harness import ALLRANKS, TORCHRUN, checked, in_turn, report, workplace

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
open(f"reduced-{generation}-{rank}", "w").write(repr(time.time()))
if generation < int(sys.argv[1]):
    dist.barrier()
    if rank == 1:
        open(f"killed-{generation}", "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
dist.destroy_process_group()
"""
RESTARTS = 100


def main() -> None:
    with workplace(script=SCRIPT) as folder:

        def when(name: str) -> float:
            return float((folder / name).read_text())

        def measure(command: list[str], *before_arguments: str) -> float:
            command = [*command, "--nproc-per-node", "2", "--max-restarts", "1", "script.py", *before_arguments, "1"]
            checked(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            return max(when("reduced-1-0"), when("reduced-1-1")) - when("killed-0")

        ours, theirs = in_turn(9, lambda: measure([*ALLRANKS, "run"], "--"), lambda: measure(TORCHRUN))
        report("killed to first all-reduce again", ours, theirs, "s", "<= 0.2")

        many = ["--nproc-per-node", "2", "--max-restarts", str(RESTARTS), "--restart-delay", "0"]
        checked([*ALLRANKS, "run", *many, "script.py", "--", str(RESTARTS)], folder)
        came_up = sum((folder / f"reduced-{generation}-1").exists() for generation in range(1, RESTARTS + 1))
    print(f"restarts that succeeded: {came_up} of {RESTARTS} (bar: {RESTARTS} of {RESTARTS})")


if __name__ == "__main__":
    main()
