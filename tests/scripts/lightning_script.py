"""A script as somebody writes it for Lightning and torchrun; nothing in it knows allranks."""

import argparse
import time
import warnings

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(data, batch_size=4))
    print(
        f"lightning: rank {trainer.global_rank} of {trainer.world_size} steps {trainer.global_step}",
        flush=True,
    )
    time.sleep(0.5)  # Without it torch's gloo aborts one of many as it exits: see let_gloo_rest.


if __name__ == "__main__":
    main()
