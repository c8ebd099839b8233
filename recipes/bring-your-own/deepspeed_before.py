"""A script with the arguments of DeepSpeed's launcher; it trains by torch's DistributedDataParallel."""

import argparse
import json
from pathlib import Path

import torch
from model import held_out_loss, make_data, make_model
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed_config", required=True)
    args = parser.parse_args()
    if not Path(args.deepspeed_config).is_file():
        parser.error(f"there is no file {args.deepspeed_config}")
    config = json.loads(Path(args.deepspeed_config).read_text())
    micro_batches = config["gradient_accumulation_steps"]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(distributed.get_rank())
    training, held_out = make_data()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=config["train_micro_batch_size_per_gpu"], sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = functional.mse_loss(model(inputs.to(device)), targets.to(device))
            (loss / micro_batches).backward()
            if number % micro_batches == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
                optimizer.step()
                optimizer.zero_grad()
        loss = held_out_loss(model, held_out, device)
        if distributed.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
    # Not in main: torch may hang where the model is the last to hold the group.
    distributed.destroy_process_group()
