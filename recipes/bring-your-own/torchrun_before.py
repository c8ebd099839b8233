"""A script for torchrun."""

import os

import torch
from model import held_out_loss, make_data, make_model
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def main():
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(distributed.get_rank())
    training, held_out = make_data()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        loss = held_out_loss(model, held_out, device)
        if distributed.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
    # Not in main: torch may hang where the model is the last to hold the group.
    distributed.destroy_process_group()
