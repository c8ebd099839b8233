"""Align images, sounds and captions of scenes, and describe scenes that were never seen, by a Lightning Trainer."""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec
from pathlib import Path

import torch
from data import END, Vocabulary, load, make
from lightning.pytorch import LightningModule, Trainer
from model import FFT, HEADS, AudioEncoder, ImageEncoder, LanguageModel, TextEncoder, contrast
from torch import Tensor, nn
from torch.nn import functional

import allranks
from allranks.lightning import AllranksEnvironment, AllranksLogger, ResumeCallback


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", type=Path, help="directory of 1.png, 1.wav, 1.txt and so on; default: scenes that are made")
    add("--image-size", type=positive, default=16, help="images are scaled to so many pixels squared")
    add("--samples", type=positive, default=2048, help="length of a recording: cut, or filled with silence")
    add("--width", type=positive, default=64, help="numbers in an embedding")
    add("--layers", type=positive, default=2, help="layers of the language model")
    add("--epochs", type=positive, default=8, help="passes over the training set, those of earlier starts included")
    add("--batch-size", type=positive, default=64, help="scenes in a step, over all ranks")
    add("--lr", type=float, default=3e-3, help="highest learning rate of AdamW")
    add("--checkpoint-dir", type=Path, help="default: checkpoints, in the directory of the run")
    add("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    add("--seed", type=int, default=0, help="seed of weights and order")
    args = parser.parse_args()
    if not args.lr > 0:
        parser.error("--lr must be greater than 0")
    if args.width % HEADS:
        parser.error(f"--width {args.width} does not divide by the {HEADS} heads of a layer")
    if args.samples < FFT:
        parser.error(f"--samples {args.samples} is too few: a spectrum takes {FFT}")
    if args.data_dir and not args.data_dir.is_dir():
        parser.error(f"there is no directory {args.data_dir}: --data-dir DIR, or leave it out")
    if args.data_dir and not find_spec("PIL"):
        parser.error("--data-dir needs a package: pip install pillow")
    return args


class Scenes(LightningModule):
    def __init__(self, ctx: allranks.Context, vocabulary: Vocabulary, args: argparse.Namespace, steps: int) -> None:
        super().__init__()
        words, length, width = len(vocabulary), vocabulary.length, args.width
        self.ctx, self.lr, self.steps, self.length = ctx, args.lr, steps, length
        self.image, self.audio = ImageEncoder(width), AudioEncoder(width)
        self.text = TextEncoder(words, length, width)
        self.language = LanguageModel(words, length, width, args.layers)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, audio, texts = batch
        seen, heard, told = self.image(images), self.audio(audio), self.text(texts)
        # Each scene is compared with those of all ranks.
        others = [self.all_gather(each, sync_grads=True).flatten(0, 1) for each in (seen, heard, told)]
        every = self.all_gather(texts).flatten(0, 1)
        alike = (every[:, None] == every[None]).all(2).float()
        alike = alike / alike.sum(1, keepdim=True)
        pairs = (others[0], others[2]), (others[1], others[2]), (others[0] + others[1], others[2])
        aligned = sum(contrast(*pair, alike, self.scale) for pair in pairs) / 3
        logits = self.language(torch.stack([seen, heard], 1), texts[:, :-1])
        described = functional.cross_entropy(logits.flatten(0, 1), texts.flatten())
        self.log_dict({"contrast": aligned, "caption": described})
        return aligned + described

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, audio, texts = batch
        seen, heard = self.image(images), self.audio(audio)
        captions = self.language.describe(torch.stack([seen, heard], 1), self.length)
        self.seen.append((seen + heard, captions, texts))

    def on_validation_epoch_end(self) -> None:
        """Score over all ranks: captions without an error, and scenes whose nearest caption is theirs."""
        mine = [torch.cat(column).cpu() for column in zip(*self.seen, strict=True)]
        self.seen.clear()
        if self.trainer.sanity_checking:
            return
        joint, captions, texts = (torch.cat(column) for column in zip(*self.ctx.control.gather(mine), strict=True))
        known = texts.unique(dim=0)
        near = (
            functional.normalize(joint.float(), dim=1)
            @ functional.normalize(self.text(known.to(self.device)).float().cpu(), dim=1).T
        )
        found = (known[near.argmax(1)] == texts).all(1).double().mean().item()
        # What follows the first END does not count.
        inside = (captions == END).cumsum(1) - (captions == END).long() < 1
        exact = ((captions == texts) | ~inside).all(1).double().mean().item()
        self.log_dict({"exact": exact, "top1": found}, sync_dist=True)
        self.ctx.print(f"Epoch {self.current_epoch + 1}: exact {exact:.4f}, top1 {found:.4f}")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = parse_args()
    with allranks.init(seed=args.seed) as ctx:
        size, samples = args.image_size, args.samples
        training, held_out, vocabulary = load(args.data_dir, size, samples) if args.data_dir else make(size, samples)
        if args.batch_size > len(training) or args.batch_size % ctx.world_size:
            raise SystemExit(
                f"error: --batch-size {args.batch_size} is impossible\n"
                f"  why: there are {len(training)} scenes to train on, and {ctx.world_size} ranks, "
                "which have equally many\n"
                f"  fix: a multiple of {ctx.world_size} up to {len(training)}"
            )
        loader = ctx.loader(training, global_batch_size=args.batch_size, drop_last=True)
        module = Scenes(ctx, vocabulary, args, steps=args.epochs * len(loader))
        resume = ResumeCallback(ctx, args.checkpoint_dir, every="10min")
        trainer = Trainer(
            max_epochs=args.epochs,
            precision=args.precision,
            devices=ctx.local_world_size,
            num_nodes=ctx.world_size // ctx.local_world_size,
            strategy="ddp",
            check_val_every_n_epoch=1 if args.epochs % 2 else 2,  # the last epoch is among them
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            plugins=AllranksEnvironment(ctx),
            callbacks=[resume],
            logger=AllranksLogger(ctx),
        )
        queries = ctx.evaluation_loader(held_out, batch_size=loader.batch_size)
        trainer.fit(module, loader, queries, ckpt_path=resume.newest)


if __name__ == "__main__":
    main()
