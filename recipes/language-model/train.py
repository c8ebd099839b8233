"""Train a GPT on text, with the parameters on every rank (DDP) or split over them (FSDP2)."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from data import SEPARATOR, load
from model import GPT, Block, Shape
from torch import nn
from torch.nn import functional

import allranks

#: Dense bf16 operations a second, in 10^12, by NVIDIA's data sheets; other devices by --peak-tflops.
PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "B200": 2250}


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="text file, directory of .txt files, or .bin file of tokens; default: made stories")
    add("--vocab-size", type=positive, default=256, help="number of tokens; 256 for text, whose tokens are bytes")
    add("--separator", type=int, default=SEPARATOR, help="token that begins a document")
    add("--see-all", action="store_true", help="tokens see the documents before their own in the sequence, too")
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=4)
    add("--width", type=positive, default=64)
    add("--sequence-length", type=positive, default=128, help="tokens of a sequence")
    add("--batch-size", type=positive, default=16, help="sequences in a step, over all ranks")
    add("--accumulate", type=positive, default=1, help="micro-batches in which each step is computed, to save memory")
    add("--steps", type=positive, default=300, help="optimizer steps, those of earlier starts included")
    add("--lr", type=float, default=1e-2, help="highest learning rate of AdamW")
    add("--warmup", type=int, default=40, help="steps in which the learning rate rises; then it falls as a cosine")
    add("--weight-decay", type=float, default=0.1, help="of matrices; not of biases and norms")
    add("--clip-norm", type=float, default=1.0, help="greatest norm of all gradients together")
    add(
        "--strategy", choices=["auto", "ddp", "fsdp"], default="auto", help="fsdp splits model and optimizer over ranks"
    )
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: mixed precision")
    add("--checkpoint-activations", action="store_true", help="compute them again in the backward pass")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--eval-every", type=positive, default=150, help="steps between evaluations on the text that is held out")
    add("--log-every", type=positive, default=50, help="steps between two lines")
    add("--peak-tflops", type=float, help="of one device, for the utilisation; default: known for common GPUs")
    add("--save-every", default="10min", help="time or steps between checkpoints: 1h, 500")
    add("--checkpoint-dir", type=Path, help="default: checkpoints, in the directory of the run")
    add("--export", type=Path, metavar="DIR", help="write the model there at the end, for transformers")
    add("--seed", type=int, default=0, help="seed of weights and order of sequences")
    args = parser.parse_args()
    if not min(args.lr, args.clip_norm, 1 if args.peak_tflops is None else args.peak_tflops) > 0:
        parser.error("--lr, --clip-norm and --peak-tflops must be greater than 0")
    if not min(args.warmup, args.weight_decay) >= 0:
        parser.error("--warmup and --weight-decay must be 0 or more")
    if args.width % args.heads:
        parser.error(f"--width {args.width} does not divide by --heads {args.heads}")
    if args.batch_size % args.accumulate:
        parser.error(f"--batch-size {args.batch_size} does not divide by --accumulate {args.accumulate}")
    if args.export and not find_spec("safetensors"):
        parser.error("--export needs a package: pip install safetensors")
    return args


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def warmup_then_cosine(step: int, warmup: int, steps: int) -> float:
    """Return the part of the highest learning rate for a step: up in a line, down to a tenth as a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def loss_of(ctx: allranks.Context, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    tokens = tokens.long() & 0xFFFF  # Token numbers are read as signed ones.
    with ctx.autocast():
        logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(ctx: allranks.Context, model: nn.Module, held_out: Any) -> float:
    """Return the mean loss; the ranks share the sequences, and each counts exactly once."""
    model.eval()
    total = 0.0
    for (tokens,) in held_out:
        total += float(loss_of(ctx, model, tokens)) * len(tokens)
    model.train()
    return ctx.sum(total)[0] / len(held_out.dataset)


def batches(ctx: allranks.Context, loader: Any, steps: int) -> Iterator[torch.Tensor]:
    """Yield the micro-batches of so many steps, over as many epochs as these take."""
    for _ in loader.epochs(steps):
        if ctx.progress.step < steps:
            for (tokens,) in loader:
                yield tokens
                if ctx.progress.step >= steps:
                    return


class Speed:
    """Tokens per second over all ranks since the last line, and what share of the devices' peak they take."""

    def __init__(self, ctx: allranks.Context, model: GPT, tokens_in_batch: int, peak: float | None) -> None:
        if peak is None and ctx.device.type == "cuda":
            name = torch.cuda.get_device_name(ctx.device)
            peak = next((peak for gpu, peak in PEAK_TFLOPS.items() if re.search(rf"\b{gpu}\b", name)), None)
        self.flops, self.tokens = model.flops_per_token(), tokens_in_batch
        self.peak = None if peak is None else peak * 1e12 * ctx.world_size
        self.restart()

    def restart(self) -> None:
        self.batches, self.since = 0, time.perf_counter()

    def measure(self) -> dict[str, float]:
        speed = self.batches * self.tokens / (time.perf_counter() - self.since)
        self.restart()
        share = {} if self.peak is None else {"flops_utilisation": speed * self.flops / self.peak}
        return {"tokens_per_second": speed, **share}


def export(ctx: allranks.Context, model: nn.Module, config: dict[str, object], folder: Path) -> None:
    """Write the model as transformers loads it. All ranks call it: a sharded model is gathered tensor by tensor."""
    tensors = {}
    for name, tensor in ctx.unwrap(model).state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if ctx.is_main:
            tensors[name] = whole.cpu()
    if ctx.is_main:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        ctx.print(f"Wrote {folder}/model.safetensors and config.json")


def main() -> None:
    args = parse_args()
    with allranks.init(seed=args.seed, precision=args.precision, log_every=args.log_every) as ctx:
        text = load(args.data, args.sequence_length, args.vocab_size)
        shape = Shape(args.vocab_size, args.sequence_length, args.layers, args.heads, args.width)
        net = GPT(shape, None if args.see_all else args.separator)
        ctx.print(
            f"Processes: {ctx.world_size} on {ctx.device.type}; {sum(each.numel() for each in net.parameters()):,} "
            f"parameters, {len(text.training):,} sequences of {args.sequence_length} tokens"
        )
        speed = Speed(ctx, net, args.batch_size // args.accumulate * args.sequence_length, args.peak_tflops)
        model = ctx.prepare(
            net,
            strategy=args.strategy,
            shard=[Block],
            checkpoint_activations=[Block] if args.checkpoint_activations else [],
            compile=args.compile,
        )
        optimizer = ctx.optimizer(make_optimizer(model, args), model, clip_norm=args.clip_norm)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, args.warmup, args.steps)
        )
        # With the last sequences dropped, all batches have one shape, for which the model is compiled once.
        loader = ctx.loader(text.training, global_batch_size=args.batch_size // args.accumulate, drop_last=True)
        held_out = ctx.evaluation_loader(text.held_out, batch_size=loader.batch_size)
        checkpoints = ctx.checkpoints(
            args.checkpoint_dir or ctx.run_dir / "checkpoints",
            every=int(args.save_every) if args.save_every.isdigit() else args.save_every,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            loader=loader,
        )
        speed.restart()
        for tokens in batches(ctx, loader, args.steps):
            with ctx.accumulate(model, args.accumulate):
                loss = loss_of(ctx, model, tokens)
                ctx.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ctx.metrics.log(loss=loss)
            speed.batches += 1
            if ctx.progress.stepped:
                schedule.step()
                report(ctx, args, speed, optimizer)
                if ctx.progress.step % args.eval_every == 0 or ctx.progress.step == args.steps:
                    loss = evaluate(ctx, model, held_out)
                    ctx.metrics.record(held_out_loss=loss)
                    known = "" if text.entropy is None else f" (the text's entropy: {text.entropy:.4f})"
                    ctx.print(f"Step {ctx.progress.step}: loss on held-out text {loss:.4f}{known}")
                    speed.restart()
            if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                break
        if not ctx.stopping and args.export:
            export(ctx, model, shape.gpt2_config(args.separator), args.export)


def report(ctx: allranks.Context, args: argparse.Namespace, speed: Speed, optimizer: torch.optim.Optimizer) -> None:
    """Print and record loss, learning rate, norm of the gradients and speed, every so many steps."""
    if ctx.progress.step % args.log_every:
        return
    loss, rate, norm = ctx.metrics.means()["loss"], optimizer.param_groups[0]["lr"], float(optimizer.grad_norm)
    measured = speed.measure()
    ctx.metrics.record(lr=rate, grad_norm=norm, **measured)
    share = f", {measured['flops_utilisation']:.1%} of peak FLOPs" if "flops_utilisation" in measured else ""
    ctx.print(
        f"Step {ctx.progress.step}: loss {loss:.4f}, lr {rate:.2e}, gradient norm {norm:.3f}, "
        f"{measured['tokens_per_second']:,.0f} tokens/s{share}"
    )


if __name__ == "__main__":
    main()
