"""ctx.on_main(): rank 0 works, the others wait, and what happens when it goes wrong."""

from __future__ import annotations

from waiting import ALL_HERE


def outcomes(results):
    return [(code, out) for code, out, _ in results]


def test_it_takes_longer_than_the_timeout_and_all_get_the_value(run_ranks):
    script = f"""{ALL_HERE}
def evaluate(wait, *, name):
    time.sleep(wait)  # The time is the subject: that of the others runs out meanwhile.
    return dict(name=name, tensor=torch.arange(3), rank=ctx.rank, inner=ctx.on_main(lambda: "inner"))
all_here(0, 1, 2)
with init(timeout=2) as ctx:
    for _ in range(2):
        print(ctx.on_main(evaluate, 3.0 if _ else 0.0, name="x"), ctx.on_main(lambda: None))
    print(ctx.sum(1))
"""
    line = "{'name': 'x', 'tensor': tensor([0, 1, 2]), 'rank': 0, 'inner': 'inner'} None\n"
    assert outcomes(run_ranks(script, world_size=3)) == [(0, line * 2 + "[3.0]\n")] * 3


def test_an_error_of_rank_0_reaches_all(run_ranks):
    script = """
import allranks
def evaluate():
    raise ValueError("no such file")
with allranks.init(timeout=100) as ctx:
    ctx.on_main(evaluate)
"""
    (first, _, err), (second, _, told) = run_ranks(script)
    assert (first, second) == (1, 1)
    assert "ValueError: no such file" in err
    assert "RankError: rank 0 failed in ctx.on_main(evaluate): ValueError: no such file\n" in told


def test_an_error_of_rank_0_can_be_caught_on_all(run_ranks):
    script = """
import allranks
with allranks.init(timeout=100) as ctx:
    for _ in range(2):
        try:
            ctx.on_main(lambda: 1 / 0)
        except (ZeroDivisionError, allranks.RankError) as error:
            print(type(error).__name__)
    print(ctx.on_main(lambda: 5))
"""
    assert outcomes(run_ranks(script)) == [(0, "ZeroDivisionError\n" * 2 + "5\n"), (0, "RankError\n" * 2 + "5\n")]


def test_a_value_that_cannot_be_sent_is_an_error_on_all(run_ranks):
    script = """
import allranks
with allranks.init(timeout=100) as ctx:
    ctx.on_main(lambda: (n for n in ()))
"""
    results = run_ranks(script)
    assert [code for code, _, _ in results] == [1, 1]
    for _, _, err in results:
        assert "what ctx.on_main(<lambda>) returned on rank 0 cannot be sent to the other ranks: generator" in err


def test_the_death_of_rank_0_ends_the_others(run_ranks):
    script = """
import os, signal, time, allranks
from pathlib import Path
has_joined = Path(__file__).with_name("has-joined")
def die():
    while not has_joined.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
with allranks.init(timeout=100) as ctx:
    if ctx.rank:
        has_joined.touch()
    ctx.on_main(die)
"""
    (first, _, _), (second, _, err) = run_ranks(script)
    assert (first, second) == (-9, 1)
    assert "RankError: rank 0 ended while rank 1 waited for it in ctx.on_main(die)" in err


def test_a_request_to_stop_ends_no_wait_for_rank_0(run_ranks, tmp_path):
    script = f"""
import os, signal, torch, allranks
with allranks.init(timeout=100) as ctx:
    checkpoints = ctx.checkpoints({str(tmp_path / "checkpoints")!r}, model=torch.nn.Linear(1, 1))
    if ctx.rank:
        signal.signal(signal.SIGTERM, lambda *_, note=signal.getsignal(signal.SIGTERM):
                      (note(*_), ctx._store.set("heard", "")))
    pids = ctx.control.gather(os.getpid())
    def evaluate():
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        while not ctx._store.check(["heard"]):
            pass
        return 7
    print(ctx.on_main(evaluate), checkpoints.step())
"""
    assert outcomes(run_ranks(script)) == [(75, "7 True\n")] * 2


def test_in_a_group_of_the_scripts_own(run_ranks):
    script = """
import torch.distributed as dist, allranks
dist.init_process_group("gloo")
for _ in range(2):
    with allranks.init() as ctx:
        print(ctx.on_main(lambda: 5))
dist.barrier()
dist.destroy_process_group()
"""
    assert outcomes(run_ranks(script)) == [(0, "5\n5\n")] * 2


def test_in_a_world_of_one(run_ranks):
    script = "import allranks\nwith allranks.init() as ctx:\n    print(ctx.on_main(max, 3, 4))\n"
    assert outcomes(run_ranks(script, world_size=1)) == [(0, "4\n")]
