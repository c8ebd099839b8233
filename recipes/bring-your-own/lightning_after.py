"""A script for Lightning, with what it needs to be continued exactly."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from model import held_out_loss, make_data, make_model
from torch.nn import functional

import allranks
from allranks.lightning import AllranksEnvironment, AllranksLogger, ResumeCallback

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
    with allranks.init(seed=None) as ctx:
        seed_everything(0)
        training, _ = make_data()
        resume = ResumeCallback(ctx, every="10min")  # saves when it is time to, and when the job is asked to stop
        trainer = Trainer(
            max_epochs=EPOCHS,
            devices=ctx.local_world_size,
            num_nodes=ctx.world_size // ctx.local_world_size,
            strategy="ddp",
            enable_progress_bar=False,
            plugins=AllranksEnvironment(ctx),
            callbacks=[resume],
            logger=AllranksLogger(ctx),  # into the run's metrics.jsonl
        )
        trainer.fit(Regression(), ctx.loader(training, global_batch_size=32), ckpt_path=resume.newest)


if __name__ == "__main__":
    main()
