"""A script as somebody writes it for Accelerate and torchrun; nothing in it knows allranks."""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        steps += 1
    print(
        f"accelerate: rank {accelerator.process_index} of {accelerator.num_processes} steps {steps}",
        flush=True,
    )
    accelerator.end_training()
    time.sleep(0.5)  # Without it torch's gloo aborts one of many as it exits: see let_gloo_rest.


if __name__ == "__main__":
    main()
