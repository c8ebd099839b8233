"""A training by Lightning without end, which is continued with the next batch."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import TensorDataset

import allranks
from allranks.lightning import AllranksEnvironment, AllranksLogger, ResumeCallback


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def main():
    with allranks.init() as ctx:
        resume = ResumeCallback(ctx)
        trainer = Trainer(
            accelerator="cpu",
            devices=ctx.local_world_size,
            num_nodes=ctx.world_size // ctx.local_world_size,
            strategy="ddp",
            max_epochs=-1,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=AllranksEnvironment(ctx),
            callbacks=[resume],
            logger=AllranksLogger(ctx),
        )
        loader = ctx.loader(TensorDataset(torch.randn(70, 4)), global_batch_size=10)
        trainer.fit(Line(), loader, ckpt_path=resume.newest)


if __name__ == "__main__":
    main()
