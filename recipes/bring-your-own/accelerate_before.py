"""A script for Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from model import held_out_loss, make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader

EPOCHS = 4


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(0)
    training, held_out = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(training, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {held_out_loss(model, held_out, accelerator.device):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
