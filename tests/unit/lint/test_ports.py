"""Launchers of one machine that meet at one port, side by side (AR315, AR326), and those that do not."""

from __future__ import annotations

import pytest

from allranks.lint.engine import lint

_RUN = "torchrun --nproc-per-node=2"
COLLIDE = {
    "side by side": f"{_RUN} --master-port=12345 a.py &\n{_RUN} --master-port=12345 b.py &\nwait",
    "beside the foreground": f"{_RUN} --master-port=12345 a.py &\n{_RUN} --master-port=12345 b.py",
    "loop": f"for s in 1 2; do {_RUN} --master-port 12345 a.py $s & done; wait",
    "loop over a list": f'for s in "$@"; do {_RUN} --master-port 12345 a.py $s & done; wait',
    "loop of numbers": f"for ((i=0; i<2; i++)); do {_RUN} --master-port 12345 a.py $i & done; wait",
    "loop with a throttle": f"for s in {{1..8}}; do {_RUN} --master-port 1 a.py & if ((s == 4)); then wait; fi; done",
    "loop of groups": f"for s in 1 2; do (cd a; {_RUN} --master-port 12345 a.py) & done; wait",
    "port from outside": f"for s in 1 2; do {_RUN} --master-port=$((10000 + SLURM_JOB_ID % 20000)) a.py & done; wait",
    "endpoint": f"for s in 1 2; do {_RUN} --rdzv-backend=c10d --rdzv-endpoint=localhost:12345 a.py & done; wait",
    "endpoint, static": f"for s in 1 2; do {_RUN} --rdzv-endpoint=localhost:12345 a.py & done; wait",
    "default of c10d": f"{_RUN} --rdzv-backend=c10d a.py &\n{_RUN} --rdzv-backend=c10d b.py &\nwait",
    "in bash -c": f"for s in 1 2; do nohup bash -c '{_RUN} --master-port=12345 a.py' & done; wait",
    "piped": f"for s in 1 2; do {_RUN} --master-port=12345 a.py 2>&1 | tee $s.log & done; wait",
    "calls of a function": f"run() {{ {_RUN} --master-port=12345 a.py $1; }}\nrun 1 &\nrun 2 &\nwait",
    "calls in a loop": f"run() {{ {_RUN} --master-port=12345 a.py $1; }}\nfor s in 1 2; do run $s & done; wait",
    "function with &": f"run() {{ {_RUN} --master-port=12345 a.py $1 & }}\nrun 1\nrun 2\nwait",
    "function with & in a loop": f"run() {{ {_RUN} --master-port=1234 a.py & }}\nfor s in 1 2; do run; done; wait",
    "functions": f"one() {{ {_RUN} --master-port=1234 a.py; }}\ntwo() {{ one & one; }}\ntwo",
    "two in a function": f"run() {{ {_RUN} --master-port=1234 a.py & {_RUN} --master-port=1234 b.py & }}\nrun; wait",
    "after cd": f"cd a && {_RUN} --master-port=1234 a.py &\ncd b && {_RUN} --master-port=1234 a.py &\nwait",
    "after cd in a loop": f"for s in a b; do cd $s && mkdir -p o && {_RUN} --master-port=1234 a.py & done; wait",
    "deepspeed": "for s in 1 2; do deepspeed --master_port 12345 a.py & done; wait",
}
DO_NOT = {
    "one after the other": f"{_RUN} --master-port=12345 a.py\n{_RUN} --master-port=12345 b.py",
    "one of them awaited": f"{_RUN} --master-port=12345 a.py &\nwait\n{_RUN} --master-port=12345 b.py &\nwait",
    "in a group": f"({_RUN} --master-port=12345 a.py; {_RUN} --master-port=12345 b.py) &\nwait",
    "loop without &": f"for s in 1 2; do {_RUN} --master-port=12345 a.py $s; done",
    "loop in the background": f"for s in 1 2; do {_RUN} --master-port=12345 a.py $s; done &\nwait",
    "loop that waits": f"for s in 1 2; do {_RUN} --master-port=12345 a.py $s & wait; done",
    "loop of one": f"for s in 1; do {_RUN} --master-port=12345 a.py $s & done; wait",
    "port of the loop": f"for s in 1 2; do {_RUN} --master-port=1234$s a.py & done; wait",
    "port that grows": f"p=12345\nfor s in 1 2; do {_RUN} --master-port=$p a.py & p=$((p + 1)); done; wait",
    "random port": f"for s in 1 2; do {_RUN} --master-port=$((10000 + RANDOM % 20000)) a.py & done; wait",
    "port of a program": f"for s in 1 2; do {_RUN} --master-port=$(free_port) a.py & done; wait",
    "port of an argument": f"train() {{ {_RUN} --master-port=$1 a.py & }}\ntrain 12345\ntrain 12346\nwait",
    "function": f"run() {{ {_RUN} --master-port=12345 a.py $1; }}\nrun 1\nrun 2",
    "function in the background": f"run() {{ {_RUN} --master-port=1234 a; {_RUN} --master-port=1234 b; }}\nrun & wait",
    "function that waits": f"run() {{ {_RUN} --master-port=12345 a.py & wait; }}\nrun\nrun",
    "port that is set before each call": f"p=1234\nrun() {{ {_RUN} --master-port=$p a.py; }}\nrun & p=1235\nrun & wait",
    "port of a call": f"run() {{ local p=$1; {_RUN} --master-port=$p a.py; }}\nrun 12345 &\nrun 12346 &\nwait",
    "function that calls itself": f"run() {{ {_RUN} --master-port=12345 a.py; run; }}\nrun &\nwait",
    "after a test": f"test -e a && {_RUN} --master-port=12345 a.py &\n{_RUN} --master-port=12345 b.py &\nwait",
    "free port": f"for s in 1 2; do {_RUN} --rdzv-backend=c10d --rdzv-endpoint=localhost:0 a.py & done; wait",
    "standalone": f"for s in 1 2; do {_RUN} --standalone a.py & done; wait",
    "ids of their own": "for s in 1 2; do\n"
    f"{_RUN} --rdzv-backend=c10d --rdzv-id=$s --rdzv-endpoint=localhost:12345 a.py &\ndone; wait",
    "nodes of one job": "for s in 0 1; do torchrun --nnodes=2 --node-rank=$s --master-port=1234 a.py & done; wait",
    "other machines": f'for h in a b; do ssh -n $h "{_RUN} --master-port=12345 a.py" & done; wait',
    "branches": f"if true; then {_RUN} --master-port=1234 a.py & else {_RUN} --master-port=1234 b.py & fi; wait",
    "networks of their own": f"for s in 1 2; do docker run image {_RUN} --master-port=12345 a.py & done; wait",
    "options in the environment": f"export PET_STANDALONE=1\nfor s in 1 2; do {_RUN} a.py & done; wait",
}


def codes(script: str) -> set[str]:
    return {finding.rule.code for finding in lint("job.sh", f"#!/bin/bash\n{script}\n".encode())} & {"AR315", "AR326"}


@pytest.mark.parametrize("case", COLLIDE)
def test_launchers_that_meet_at_one_port_are_found(case: str) -> None:
    assert codes(COLLIDE[case]) == {"AR315"}


@pytest.mark.parametrize("case", DO_NOT)
def test_launchers_that_do_not_meet_are_not_found(case: str) -> None:
    assert codes(DO_NOT[case]) == set()


def test_two_launchers_without_a_port_take_the_default() -> None:
    found = lint("job.sh", f"#!/bin/bash\nfor s in 1 2; do\n{_RUN} a.py $s &\ndone\nwait\n".encode())
    assert [(finding.place.line, finding.what) for finding in found if finding.rule.code == "AR326"] == [
        (
            3,
            "the launchers of a loop run side by side without a port: each takes 29500, and the second one fails with "
            "EADDRINUSE",
        )
    ]


def test_two_launchers_one_after_the_other_may_take_the_default() -> None:
    assert codes(f"{_RUN} a.py\n{_RUN} b.py") == set()
