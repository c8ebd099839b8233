"""Train a network that writes what is heard: the notes of a melody, or how two melodies compare."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from data import END, HELD_OUT, Bucketed, Recordings, collate, load, make
from model import HEADS, Listener
from torch import Tensor, nn
from torch.nn import functional

import allranks

MOST = 4  # words of an n-gram


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", type=Path, help="directory of 1.wav, 1.txt and so on, or of tar files; default: made melodies")
    add("--melodies", type=positive, default=3000, help="number of examples that are made")
    add("--width", type=positive, default=64, help="numbers in a place of the network")
    add("--layers", type=positive, default=2, help="layers of the decoder")
    add("--batch-size", type=positive, default=64, help="examples in a step, over all ranks")
    add("--steps", type=positive, default=400, help="optimizer steps, those of earlier starts included")
    add("--lr", type=float, default=3e-3, help="highest learning rate of AdamW")
    add("--beam", type=positive, default=3, help="beams of the search that writes; 1: greedily")
    add("--eval-every", type=positive, default=100, help="steps between two evaluations")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--checkpoint-dir", type=Path, help="default: checkpoints, in the directory of the run")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args()
    if not args.lr > 0:
        parser.error("--lr must be greater than 0")
    if args.melodies < HELD_OUT:
        parser.error(f"--melodies {args.melodies} is too few: {HELD_OUT} or more, of which every tenth is held out")
    if args.width % HEADS:
        parser.error(f"--width {args.width} does not divide by the {HEADS} heads of a layer")
    if args.data_dir and not args.data_dir.is_dir():
        parser.error(f"there is no directory {args.data_dir}: --data-dir DIR, or leave it out")
    return args


def rate(step: int, steps: int) -> float:
    """Return the part of the highest learning rate for a step: up in a tenth of them, then down to 0."""
    return min(10 * (step + 1) / steps, (steps - step) / (0.9 * steps))


def loss_of(logits: Tensor, texts: Tensor) -> Tensor:
    """Return the cross entropy of the words up to the first END: the mean of each text's, so that ranks count alike."""
    is_word = functional.pad(texts[:, :-1] != END, (1, 0), value=True)
    losses = functional.cross_entropy(logits.transpose(1, 2), texts, reduction="none") * is_word
    return (losses.sum(1) / is_word.sum(1)).mean()


@torch.no_grad()
def evaluate(ctx: allranks.Context, model: nn.Module, loader: object, length: int, beam: int) -> dict[str, float]:
    """Return how many texts are right, and their BLEU, over all ranks: each example counts once."""
    listener: Listener = getattr(model, "module", model)
    model.eval()
    counts = torch.zeros(4 + 2 * MOST, dtype=torch.float64)
    for audio, lengths, texts in loader:
        with ctx.autocast():
            written = listener.write(audio, lengths, length, beam)
        for mine, right in zip(written.tolist(), texts.tolist(), strict=True):
            counts += torch.tensor(count(words(mine), words(right)))
    model.train()
    sums = ctx.sum(*counts.tolist())
    return {"exact": sums[1] / sums[0], "bleu": bleu(sums[2:])}


def words(text: list[int]) -> list[int]:
    return text[: text.index(END)] if END in text else text


def count(mine: list[int], right: list[int]) -> list[float]:
    """Return for one text: 1, whether it is right, both lengths; and of each n, n-grams that are right, and all."""
    found = [1.0, float(mine == right), float(len(mine)), float(len(right))]
    for n in range(1, MOST + 1):
        ours, theirs = (Counter(zip(*(each[at:] for at in range(n)), strict=False)) for each in (mine, right))
        found += [float((ours & theirs).total()), float(ours.total())]
    return found


def bleu(sums: list[float]) -> float:
    """Return BLEU from sums over all texts: Papineni et al. 2002, "BLEU: a Method for Automatic Evaluation", 2.3."""
    length, reference, *grams = sums
    pairs = [(right, total) for right, total in zip(grams[::2], grams[1::2], strict=True) if total]
    if not pairs or not all(right for right, _ in pairs):
        return 0.0
    precision = math.exp(sum(math.log(right / total) for right, total in pairs) / len(pairs))
    return precision * min(1.0, math.exp(1 - reference / length))


def main() -> None:
    args = parse_args()
    with allranks.init(seed=args.seed, precision=args.precision) as ctx:
        training: Recordings
        training, held_out = load(args.data_dir) if args.data_dir else make(args.melodies)
        if args.batch_size > len(training) or args.batch_size % ctx.world_size:
            raise SystemExit(
                f"error: --batch-size {args.batch_size} is impossible\n  why: there are {len(training)} examples, and "
                f"{ctx.world_size} ranks, which have equally many\n  fix: a multiple of {ctx.world_size} "
                f"up to {len(training)}"
            )
        vocabulary = training.vocabulary
        ctx.print(
            f"Processes: {ctx.world_size} on {ctx.device.type}; {len(training)} examples, {len(held_out)} held out"
        )
        model = ctx.prepare(Listener(len(vocabulary), args.width, args.layers))
        optimizer = ctx.optimizer(torch.optim.AdamW, model, lr=args.lr, clip_norm=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
        endless = Bucketed(training, args.batch_size, ctx.world_size, args.seed)  # It shuffles by itself.
        options = {"collate_fn": collate}
        loader = ctx.loader(endless, global_batch_size=args.batch_size, shuffle=False, quiet=True, **options)
        queries = ctx.evaluation_loader(held_out, batch_size=loader.batch_size, **options)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        checkpoints = ctx.checkpoints(args.checkpoint_dir or ctx.run_dir / "checkpoints", every="10min", **parts)
        for audio, lengths, texts in islice(loader, max(0, args.steps - ctx.progress.step)):
            with ctx.autocast():
                loss = loss_of(model(audio, lengths, texts), texts)
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            ctx.metrics.log(loss=loss)
            if ctx.progress.step % args.eval_every == 0 or ctx.progress.step == args.steps:
                scores = {"loss": ctx.metrics.means()["loss"]}
                scores |= evaluate(ctx, model, queries, vocabulary.length, args.beam)
                ctx.metrics.record(**scores)
                shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
                ctx.print(f"Step {ctx.progress.step}: {shown}")
            if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                break


if __name__ == "__main__":
    main()
