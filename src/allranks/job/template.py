"""What ``allranks init`` writes: a job file and a training script to start from, and what git is to ignore."""

from __future__ import annotations

from typing import Final

JOB_TEMPLATE: Final = """\
# A job for allranks. Try:  allranks plan job.yaml  ·  allranks run job.yaml
# All keys, for editors and for reading:  allranks schema

script: train.py              # relative to workdir; or module: my.package, or binary: ./program
args: [--epochs, 3]
# workdir: .                  # relative to this file
# cluster: local              # or a name from clusters.yaml

launch:
  nproc_per_node: auto        # ranks on each node: a number, gpu, cpu, or auto (GPUs, else one)
  # backend: gloo             # default: nccl where there are GPUs, else gloo
  # max_restarts: 3           # restart all ranks when one fails

# resources:
#   nodes: 1                  # or 2:4 for at least 2 and at most 4
#   gpus_per_node: 8
#   memory: 200GB
#   time: 48:00:00

# environment:
#   conda: my-env             # or venv: .venv
#   variables:
#     NCCL_DEBUG: WARN
#   setup: |
#     module load cuda        # shell lines that run once, before the nodes are started

# scheduler:
#   partition: gpu
#   account: my-project
"""

SCRIPT_TEMPLATE: Final = '''\
"""A small training on any number of ranks, which continues where it was stopped.

Start it with  allranks run job.yaml,  torchrun --nproc-per-node 2 train.py  or  python train.py.
"""

import argparse

import torch
from torch.utils.data import TensorDataset

import allranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a step on each rank")
    options = parser.parse_args()

    with allranks.init() as ctx:
        generator = torch.Generator().manual_seed(0)  # every rank makes the same data, and gets its share of it
        inputs = torch.randn(512, 8, generator=generator)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

        model = ctx.prepare(torch.nn.Linear(8, 1))
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
        loader = ctx.loader(data, batch_size=options.batch_size)
        # allranks resume continues from there; another run has a folder of its own, and starts from the beginning
        checkpoints = ctx.checkpoints(
            ctx.run_dir / "checkpoints", every="10min", model=model, optimizer=optimizer, loader=loader
        )
        for epoch in loader.epochs(options.epochs):
            for batch, target in loader:
                loss = torch.nn.functional.mse_loss(model(batch), target)
                ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ctx.metrics.log(loss=loss)
                if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                    break
            else:
                ctx.print(f"epoch {epoch + 1}: loss {ctx.metrics.means()['loss']:.4f}")


if __name__ == "__main__":
    main()
'''

MINIMAL_JOB: Final = "script: train.py\n"

MINIMAL_SCRIPT: Final = """\
import torch
from torch.utils.data import TensorDataset

import allranks

with allranks.init() as ctx:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))  # the same data on all ranks
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = ctx.prepare(torch.nn.Linear(8, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    loader = ctx.loader(data, batch_size=32)  # each rank gets its share
    for epoch in loader.epochs(3):
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ctx.metrics.log(loss=loss)
        ctx.print(f"epoch {epoch + 1}: loss {ctx.metrics.means()['loss']:.4f}")
"""

#: What a run, and the script started alone, leave in the project.
IGNORED: Final = ("runs/", "checkpoints/", "metrics.jsonl", "__pycache__/")
