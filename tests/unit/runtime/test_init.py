"""allranks.init() in real processes: seeds, sums, errors, and leaving."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest

import allranks
from waiting import ALL_HERE, PATIENCE

SCRIPT = """
import json, os, random, sys
import allranks

with allranks.init(seed=7) as ctx:
    import numpy, torch
    facts = dict(
        rank=ctx.rank, local_rank=ctx.local_rank, world_size=ctx.world_size, environment=ctx.environment,
        local_world_size=ctx.local_world_size, node_rank=ctx.node_rank, device=str(ctx.device),
        backend=ctx.backend, main=ctx.is_main, sum=ctx.sum(1, ctx.rank), env=os.environ["LOCAL_WORLD_SIZE"],
        random=[random.random(), numpy.random.rand(), torch.rand(1).item()], terminal=ctx.terminal,
    )
    ctx.barrier()
    ctx.print("only once")
ctx.close()
sys.stdout.write(json.dumps(facts) + "\\n")  # in one piece, since the ranks share a pipe
"""


def facts_of(results):
    assert [(code, err) for code, _, err in results] == [(0, "")] * len(results)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]


@pytest.mark.smoke
def test_two_ranks_agree_and_differ_where_they_should(run_ranks):
    results = run_ranks(SCRIPT, ALLRANKS_TERMINAL="1")
    first, second = facts_of(results)
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["sum"] == second["sum"] == [2, 1]
    assert (second["local_world_size"], second["node_rank"], second["env"]) == (2, 0, "2")
    assert all(a != b for a, b in zip(first["random"], second["random"], strict=True))
    assert [out.count("only once") for _, out, _ in results] == [1, 0]
    assert first["terminal"]
    assert facts_of(run_ranks(SCRIPT))[1]["random"] == second["random"]


def test_alone(clean_env, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], env=clean_env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    (facts,) = facts_of([(done.returncode, done.stdout, done.stderr)])
    assert (facts["rank"], facts["world_size"], facts["environment"]) == (0, 1, "single process")
    assert facts["sum"] == [1, 0]
    assert not facts["terminal"]


def test_under_torchrun(clean_env, tmp_path, free_port):
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch, and so does each rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}"]
    done = subprocess.run(
        [*command, script], env=clean_env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(fact["rank"] for fact in facts) == [0, 1]


@pytest.mark.parametrize(
    ("mpirun", "name"), [("mpirun.openmpi --oversubscribe", "Open MPI"), ("mpiexec.hydra", "MPICH")]
)
def test_under_mpi(mpirun, name, clean_env, tmp_path):
    """It takes more than 10 s on a slow machine: each rank imports torch."""
    program, *options = mpirun.split()
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}: apt-get install openmpi-bin mpich")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    wrapper = tmp_path / "wrapper.sh"  # stands between rank and mpirun
    wrapper.write_text(f"'{sys.executable}' '{script}'\ntrue\n")
    env = {**clean_env, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [program, *options, "-n", "2", "sh", str(wrapper)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted((fact["environment"], fact["rank"], fact["sum"]) for fact in facts) == [
        (name, 0, [2, 1]),
        (name, 1, [2, 1]),
    ]


def test_an_error_in_one_rank_does_not_hang_it_although_a_collective_is_in_flight(run_ranks, tmp_path):
    """Rank 0 stays until rank 1 is gone, which closes the pipe: a rank 1 that waits for it would wait forever."""
    os.mkfifo(tmp_path / "pipe")
    script = """
import os, sys, torch, allranks
from pathlib import Path
pipe = Path(__file__).with_name("pipe")
with allranks.init() as ctx:
    if ctx.rank == 1:
        held = pipe.open("w")
        work = torch.distributed.all_reduce(torch.ones(3), async_op=True)
        raise ValueError("the first error")
    pipe.read_text()
    print("rank 1 is gone", flush=True)
    os._exit(0)
"""
    (code, out, _), (failed, _, err) = run_ranks(script)
    assert (code, out) == (0, "rank 1 is gone\n")
    assert failed == 1
    assert "ValueError: the first error" in err


def test_exit_codes_pass(run_ranks):
    script = "import sys, allranks\nwith allranks.init() as ctx:\n    sys.exit(ctx.rank * 5)\n"
    assert [code for code, _, _ in run_ranks(script)] == [0, 5]


def test_called_twice_is_an_error_and_after_close_it_is_not(run_ranks):
    script = """
import allranks
first = allranks.init()
try:
    allranks.init()
except allranks.RankError as error:
    print(error)
first.close()
with allranks.init() as second:
    print(second.sum(1))
"""
    for code, out, err in run_ranks(script):
        assert (code, err) == (0, "")
        assert out.startswith("allranks.init() was called a second time\n  why: ")
        assert out.endswith("[2.0]\n")


def test_a_group_of_the_scripts_own_is_used_and_left_alone(run_ranks):
    script = """
import allranks, torch.distributed as dist
dist.init_process_group("gloo")
with allranks.init() as ctx:
    print(ctx.backend, ctx.sum(1))
assert dist.is_initialized()
dist.barrier()
dist.destroy_process_group()
"""
    assert [(code, out) for code, out, _ in run_ranks(script)] == [(0, "gloo [2.0]\n")] * 2


def test_missing_ranks_are_named(run_ranks):
    results = run_ranks(f"{ALL_HERE}all_here(0, 2)\ninit(timeout=2)\n", world_size=4, ranks=[0, 2])
    for code, _, err in results:
        assert code == 1
        assert "RankError: ranks 1 and 3 did not reach allranks.init() within 2 s" in err


def test_a_port_in_use_is_named(run_ranks, free_port):
    import socket

    with socket.create_server(("", free_port)):
        ((code, _, err),) = run_ranks("import allranks\nallranks.init(timeout=5)\n", ranks=[0])
    assert code == 1
    assert f"cannot listen at 127.0.0.1:{free_port}" in err
    assert "fix: set MASTER_PORT to a free port" in err


def test_nccl_without_a_gpu(run_ranks):
    script = "import allranks\nallranks.init()\n"
    ((code, _, err),) = run_ranks(script, world_size=1, ALLRANKS_BACKEND="nccl", CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert "DeviceError: rank 0 (local rank 0) on " in err
    assert "needs GPU 0, but there are none" in err


def test_half_set_stops_before_anything(run_ranks):
    ((code, _, err),) = run_ranks("import allranks\nallranks.init()\n", ranks=[0], MASTER_ADDR="")
    assert code == 1
    assert "RankEnvironmentError: RANK and WORLD_SIZE and MASTER_PORT are set, but MASTER_ADDR is not" in err


def test_importing_allranks_imports_no_torch(clean_env):
    code = (
        "import sys, allranks; allranks.__version__; dir(allranks); allranks.Context, allranks.init; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_name_of_the_context():
    with pytest.raises(AttributeError, match=r"^allranks has no 'print': perhaps ctx\.print, if ctx is what"):
        allranks.print  # noqa: B018


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ({"precision": "bf8"}, "invalid precision: 'bf8'", "did you mean precision='bf16'?"),
        ({"precision": "half"}, "invalid precision: 'half'", "precision='fp32'"),
        ({"timeout": -1}, "invalid timeout: -1", "timeout=600, the default, or more"),
        ({"timeout": 0.0}, "invalid timeout: 0.0", "timeout=600, the default, or more"),
        ({"timeout": "600"}, "invalid timeout: '600'", "timeout=600, the default, or more"),
        ({"timeout": float("inf")}, "invalid timeout: inf", "timeout=600, the default, or more"),
        ({"timeout": timedelta(0)}, "invalid timeout: datetime.timedelta(0)", "timeout=600, the default, or more"),
    ],
)
def test_arguments_that_make_no_sense(options, what, fix):
    with pytest.raises(allranks.RankError) as caught:
        allranks.init("gloo", **options)
    assert (caught.value.what, caught.value.fix) == (what, fix)
    assert "expected" in caught.value.why
