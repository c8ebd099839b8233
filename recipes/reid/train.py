"""Train a network that recognises individuals in images, also those that it has not seen in training."""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from data import Balanced, load
from model import Embedder, SubcenterArcFace
from torch import Tensor, nn

import allranks

TOP = (1, 5)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args() -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    beside = Path(__file__).with_name("config.json")
    first.add_argument("--config", type=Path, default=beside, help="JSON file of arguments; those that are typed win")
    parser = argparse.ArgumentParser(description=__doc__, parents=[first], allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", type=Path, help="directory with a folder of images for each individual; default: drawn images")
    add("--individuals", type=positive, default=64, help="number of individuals that are drawn")
    add("--backbone", help="network of timm, such as resnet50; default: a small one")
    add("--pretrained", action="store_true", help="with the weights that timm has for it")
    add("--partial-fc", action="store_true", help="split the classifier over the ranks, for many individuals")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the network; the loss is computed in fp32")
    add("--tracker", choices=["jsonl", "tensorboard", "wandb"], default="jsonl", help="where rank 0 writes metrics")
    add("--eval-every", type=positive, default=50, help="steps between two evaluations, after which is saved")
    add("--checkpoint-dir", type=Path, help="default: checkpoints, in the directory of the run")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    config = parser.add_argument_group("what config.json has").add_argument
    config("--image-size", type=positive, required=True, help="images are scaled to so many pixels squared")
    config("--width", type=positive, required=True, help="numbers in an embedding")
    config("--centers", type=positive, required=True, help="centers of each individual in the classifier")
    config("--scale", type=float, required=True, help="of the cosines in the loss")
    config("--individuals-per-batch", type=positive, required=True, help="over all ranks")
    config("--images-per-individual", type=positive, required=True, help="in a batch")
    config("--steps", type=positive, required=True, help="optimizer steps, those of earlier starts included")
    config("--lr", type=float, required=True, help="highest learning rate of AdamW")
    config("--warmup", type=int, required=True, help="steps in which the rate rises; then it falls as a cosine")
    config("--weight-decay", type=float, required=True)
    args = parser.parse_args([*read_config(first.parse_known_args()[0].config), *sys.argv[1:]])
    if not min(args.lr, args.scale) > 0:
        parser.error("--lr and --scale must be greater than 0")
    if not min(args.warmup, args.weight_decay) >= 0:
        parser.error("--warmup and --weight-decay must be 0 or more")
    if args.data_dir and not find_spec("PIL"):
        parser.error("--data-dir needs a package: pip install pillow")
    if args.backbone and not find_spec("timm"):
        parser.error("--backbone needs a package: pip install timm")
    return args


def read_config(path: Path) -> list[str]:
    """Return the arguments in a JSON file such as ``{"steps": 300, "partial-fc": true}``, as they would be typed."""
    try:
        values = json.loads(path.read_text())
        return [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in values.items()
            if value is not False
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(
            f"error: cannot read {path}\n  why: {error}\n  fix: a JSON object, as in config.json"
        ) from error


def rate(step: int, warmup: int, steps: int) -> float:
    """Return the part of the highest learning rate for a step: up in a line, down to a hundredth as a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.495 * (1 + math.cos(math.pi * min(1.0, done)))


def embed(ctx: allranks.Context, model: nn.Module, images: Tensor) -> Tensor:
    with ctx.autocast():
        return model(images).float()


@torch.no_grad()
def evaluate(ctx: allranks.Context, model: nn.Module, held_out: Any) -> dict[str, float]:
    """Return mAP and top-k of images that are each looked for among all others; the ranks share the queries."""
    model.eval()
    batches = [(embed(ctx, model, images).cpu(), labels.cpu()) for images, labels in held_out]
    model.train()
    mine = [torch.cat(column) for column in zip(*batches, strict=True)]
    gathered = ctx.control.gather(mine)  # Each image exactly once: the loader has not padded its batches.
    embeddings, labels = (torch.cat(column) for column in zip(*gathered, strict=True))
    first = sum(len(theirs) for _, theirs in gathered[: ctx.rank])
    own = torch.arange(first, first + len(mine[1]))
    # A thousand queries at a time, for the memory that their order takes.
    sums = ctx.sum(*sum(score(embeddings, labels, queries) for queries in own.split(1000)).tolist())
    return {name: value / sums[-1] for name, value in zip(("mAP", *(f"top{k}" for k in TOP)), sums, strict=False)}


def score(embeddings: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Return sums over the queries, numbers of images: average precision, hits among the first k, number of queries.

    The average precision is the mean of the precision down to each image of the same individual (Manning et al. 2008,
    "Introduction to Information Retrieval", section 8.4). The only image of an individual is no query.
    """
    alike = embeddings[queries] @ embeddings.T
    alike[torch.arange(len(queries)), queries] = -math.inf  # The query itself comes last, and is cut off.
    ranked = alike.argsort(dim=1, descending=True)[:, :-1]
    hits = (labels[ranked] == labels[queries, None]).double()
    hits = hits[hits.any(1)]
    precision = hits.cumsum(1) / torch.arange(1, 1 + hits.shape[1])
    average = (precision * hits).sum(1) / hits.sum(1)
    return torch.stack([average.sum(), *(hits[:, :k].amax(1).sum() for k in TOP), hits.new_tensor(len(hits))])


def main() -> None:
    args = parse_args()
    trackers = [] if args.tracker == "jsonl" else [args.tracker]
    with allranks.init(seed=args.seed, precision=args.precision, trackers=trackers) as ctx:
        training, held_out = load(args.data_dir, args.image_size, args.individuals)
        individuals, each = args.individuals_per_batch, args.images_per_individual
        if individuals > len(training.of) or individuals % ctx.world_size:
            raise SystemExit(
                f"error: --individuals-per-batch {individuals} is impossible\n"
                f"  why: there are {len(training.of)} to train on, each at most once in a batch, "
                f"and {ctx.world_size} ranks, which have equally many\n"
                f"  fix: a multiple of {ctx.world_size} up to {len(training.of)}"
            )
        ctx.print(
            f"Processes: {ctx.world_size} on {ctx.device.type}; {len(training)} images of {len(training.of)} "
            f"individuals; held out: {len(held_out)} of {len(held_out.of)}"
        )
        ctx.metrics.config({name: str(value) for name, value in vars(args).items()})
        model = ctx.prepare(Embedder(args.width, args.backbone, pretrained=args.pretrained))
        classifier: nn.Module = SubcenterArcFace(
            [len(images) for images in training.of],
            args.width,
            device=ctx.device,
            centers=args.centers,
            scale=args.scale,
            seed=args.seed,
            split=args.partial_fc,
        )
        if not args.partial_fc:
            classifier = ctx.prepare(classifier)
        optimizer = ctx.optimizer(
            torch.optim.AdamW,
            [*model.parameters(), *classifier.parameters()],
            lr=args.lr,
            weight_decay=args.weight_decay,
            **({"foreach": False} if args.partial_fc else {}),  # One by one: whole and split ones do not mix.
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.warmup, args.steps))
        # It shuffles by itself, and is endless.
        endless = Balanced(training, individuals, each, args.seed)
        loader = ctx.loader(endless, global_batch_size=individuals * each, shuffle=False, quiet=True)
        queries = ctx.evaluation_loader(held_out, batch_size=loader.batch_size)
        folder = args.checkpoint_dir or ctx.run_dir / "checkpoints"
        checkpoints = ctx.checkpoints(
            folder,
            keep=1,
            best="mAP:max",
            every="10min",
            model=model,
            classifier=classifier,
            optimizer=optimizer,
            schedule=schedule,
            loader=loader,
        )
        for images, labels in islice(loader, max(0, args.steps - ctx.progress.step)):
            loss = classifier(embed(ctx, model, images), labels)
            ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            ctx.metrics.log(loss=loss)
            if ctx.progress.step % args.eval_every == 0 or ctx.progress.step == args.steps:
                scores = {"loss": ctx.metrics.means()["loss"], **evaluate(ctx, model, queries)}
                ctx.metrics.record(**scores)
                shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
                ctx.print(f"Step {ctx.progress.step}: {shown}")
                checkpoints.save(scores["mAP"])
            if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                break


if __name__ == "__main__":
    main()
