"""A script for Lightning."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from model import held_out_loss, make_data, make_model
from torch.nn import functional
from torch.utils.data import DataLoader

EPOCHS = 4


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        loss = held_out_loss(self.layers, make_data()[1], self.device)
        self.print(f"epoch {self.current_epoch + 1}: loss {loss:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    seed_everything(0)
    training, _ = make_data()
    trainer = Trainer(
        max_epochs=EPOCHS,
        devices=2,
        strategy="ddp",
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), DataLoader(training, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
