"""A script for Accelerate, with what it needs to be continued exactly."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from model import held_out_loss, make_data, make_model
from torch.nn import functional

import allranks

EPOCHS = 4


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(0)
    ctx = allranks.init(seed=None)  # uses the process group that is there, and the script's own seeds
    training, held_out = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ctx.loader(training, batch_size=8)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = ctx.checkpoints(ctx.run_dir / "checkpoints", every="10min", **parts)
    for epoch in loader.epochs(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and checkpoints.step():
                ctx.close()  # exits: to be continued
        accelerator.print(f"epoch {epoch + 1}: loss {held_out_loss(model, held_out, accelerator.device):.4f}")
    ctx.close()  # completes the last checkpoint
    accelerator.end_training()


if __name__ == "__main__":
    main()
