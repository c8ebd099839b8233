"""A script with the arguments of DeepSpeed's launcher, with what it needs to be continued exactly."""

import argparse
import json
import os
from pathlib import Path

import torch
from model import held_out_loss, make_data, make_model
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import allranks

EPOCHS = 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=os.environ["LOCAL_RANK"])
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
    ctx = allranks.init(seed=None)  # uses the process group that is there, and the script's own seeds
    training, held_out = make_data()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    loader = ctx.loader(training, batch_size=config["train_micro_batch_size_per_gpu"])
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = ctx.checkpoints(ctx.run_dir / "checkpoints", every="10min", **parts)
    for epoch in loader.epochs(EPOCHS):
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = functional.mse_loss(model(inputs.to(device)), targets.to(device))
            (loss / micro_batches).backward()
            if number % micro_batches == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
                optimizer.step()
                optimizer.zero_grad()
                if checkpoints.step():  # after a whole step: gradients that are added up so far are not saved
                    ctx.close()  # exits: to be continued
        loss = held_out_loss(model, held_out, device)
        if distributed.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
    ctx.close()  # completes the last checkpoint


if __name__ == "__main__":
    main()
    # Not in main: torch may hang where the model is the last to hold the group.
    distributed.destroy_process_group()
