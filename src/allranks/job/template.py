"""What ``allranks init`` writes: a job file and a training script to start from."""

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
  # max_restarts: 3           # start the ranks anew when one has failed

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
"""A small training with DistributedDataParallel.

Start it with  allranks run job.yaml,  torchrun --nproc-per-node 2 train.py  or  python train.py.
"""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()

    with allranks.init() as ctx:
        generator = torch.Generator().manual_seed(0)  # every rank makes the same data, and reads its share
        inputs = torch.randn(512, 8, generator=generator)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        sampler = DistributedSampler(data, num_replicas=ctx.world_size, rank=ctx.rank)
        loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)

        model = torch.nn.Linear(8, 1).to(ctx.device)
        if ctx.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # another order in each epoch
            for batch, target in loader:
                loss = torch.nn.functional.mse_loss(model(batch.to(ctx.device)), target.to(ctx.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if ctx.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
'''
