"""``allranks init``: a job file and a script to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import click

from allranks import contract
from allranks.cli import render
from allranks.errors import UsageError
from allranks.job.problems import listed

JOB_TEMPLATE: Final = """\
# A job for allranks. Try:  allranks plan job.yaml  ·  allranks run job.yaml
# All keys, for editors and for reading:  allranks schema

script: train.py              # relative to workdir; or module: my.package, or binary: ./program
args: [--epochs, 3]
# workdir: .                  # relative to this file
# cluster: local              # or a name from clusters.yaml

launch:
  nproc_per_node: auto        # ranks on each node: a number, gpu, cpu, or auto (GPUs, else one)
  # backend: gloo             # default: nccl where there are GPUs, else gloo
  # max_restarts: 3           # restart all ranks when one fails

# resources:
#   nodes: 1                  # or 2:4 for at least 2 and at most 4
#   gpus_per_node: 8
#   memory: 200GB
#   time: 48:00:00

# environment:
#   modules: [cuda/12.4]      # module load, on each node
#   conda: my-env             # or venv: .venv
#   variables:
#     NCCL_DEBUG: WARN

# scheduler:
#   partition: gpu
#   account: my-project
"""

SCRIPT_TEMPLATE: Final = '''\
"""A small training on any number of ranks, which continues where it was stopped.

Start it with  allranks run job.yaml,  torchrun --nproc-per-node 2 train.py  or  python train.py.
"""

import argparse

import torch
from torch.utils.data import TensorDataset

import allranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a step on each rank")
    options = parser.parse_args()

    with allranks.init() as ctx:
        generator = torch.Generator().manual_seed(0)  # every rank makes the same data, and gets its share of it
        inputs = torch.randn(512, 8, generator=generator)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

        model = ctx.prepare(torch.nn.Linear(8, 1))
        optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
        loader = ctx.loader(data, batch_size=options.batch_size)
        # allranks resume continues from there; another run has a directory of its own, and starts from the beginning
        checkpoints = ctx.checkpoints(
            ctx.run_dir / "checkpoints", every="10min", model=model, optimizer=optimizer, loader=loader
        )
        for epoch in loader.epochs(options.epochs):
            for batch, target in loader:
                loss = torch.nn.functional.mse_loss(model(batch), target)
                ctx.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                ctx.metrics.log(loss=loss)
                if checkpoints.step():  # saves when it is time to, and when the job is asked to stop
                    break
            else:
                ctx.print(f"epoch {epoch + 1}: loss {ctx.metrics.means()['loss']:.4f}")


if __name__ == "__main__":
    main()
'''

#: Scripts of the user that are used instead of ours.
_SCRIPTS: Final = ("train.py", "main.py")
#: What a run, and the script started alone, leave in the project.
IGNORED: Final = ("runs/", "checkpoints/", "metrics.jsonl", "__pycache__/")


@click.command("init")
@click.argument("folder", default=".", type=click.Path(file_okay=False))
@click.option("--recipe", metavar="NAME", help="Copy a complete training, such as mnist, instead.")
@click.option("--list", "listing", is_flag=True, help="List the recipes, and write nothing.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def command(folder: str, recipe: str | None, listing: bool, force: bool) -> int:
    """Write a commented job.yaml, a train.py and a .gitignore into FOLDER (default: here).

    A train.py or main.py that is there already is kept, and job.yaml runs it. With --recipe, the files are those of a
    complete training, to be changed. A .gitignore that exists keeps its lines, and gets those that are missing.
    """
    if listing:
        rows = [(name, _summary(path)) for name, path in _recipes().items()]
        render.data(render.table(("RECIPE", "WHAT IT TRAINS"), rows))
        return 0
    files = {"job.yaml": JOB_TEMPLATE.encode(), "train.py": SCRIPT_TEMPLATE.encode()}
    if recipe:
        files = _files_of(recipe)
    may_keep = not (recipe or force or (Path(folder) / "job.yaml").exists())
    yours = next((name for name in _SCRIPTS if may_keep and (Path(folder) / name).is_file()), None)
    if yours:  # What arguments it takes is not known.
        job = JOB_TEMPLATE.replace("\nargs:", "\n# args:").replace("script: train.py", f"script: {yours:8}")
        files = {"job.yaml": job.encode()}
    there = [str(path) for name in files if (path := Path(folder) / name).exists()]
    if there and not force:
        fix = "write into another directory (allranks init DIRECTORY), or overwrite with --force"
        raise UsageError(f"{listed(there, 'and')} exist{'s' * (len(there) == 1)} already", fix=fix)
    try:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            render.talk(f"wrote {path}" + (f" for your {yours}" if yours else ""))
        _ignore(Path(folder) / ".gitignore")
    except OSError as error:
        fix = "allranks init DIRECTORY with one that you may write to"
        raise UsageError(f"cannot write into {folder}", why=error.strerror, fix=fix) from error
    render.talk("next: allranks run" if folder == "." else f"next: cd {shlex.quote(folder)} && allranks run")
    return 0


def _recipes() -> dict[str, Path]:
    """Return the directories of the recipes, by name: each has a job.yaml and a README.md."""
    package = contract.installation()
    # setup.py copies them into the package. Where that is used from its sources, they lie beside src.
    found = [path for root in (package, package.parents[1]) for path in sorted(root.glob("recipes/*/README.md"))]
    return {path.parent.name: path.parent for path in found if (path.parent / "job.yaml").is_file()}


def _summary(recipe: Path) -> str:
    """Return the first sentence below the heading of a recipe's README."""
    _, _, text = (recipe / "README.md").read_text(encoding="utf-8").partition("\n\n")
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _files_of(recipe: str) -> dict[str, bytes]:
    """Return the files of a recipe: path in its directory to content.

    Raises:
        UsageError: if there is no such recipe.
    """
    recipes = _recipes()
    if recipe not in recipes:
        raise UsageError(f"no recipe {recipe!r}", fix=f"the recipes are {', '.join(recipes)}; allranks init --list")
    folder, left = recipes[recipe], {name.strip("/") for name in IGNORED}
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(name): (folder / name).read_bytes() for name in names if left.isdisjoint(name.parts)}


def _ignore(path: Path) -> None:
    """Have git ignore what runs leave: a file that exists belongs to the user, and only gets the missing lines."""
    # Bytes that are no UTF-8 stay as they are: lines are only added.
    before = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    # /runs, runs and runs/ all ignore it; "!runs" says that the user wants it in git.
    there = {line.strip().lstrip("!").strip("/") for line in before.splitlines()}
    missing = [line for line in IGNORED if line.strip("/") not in there]
    if not missing:
        return
    ending = "\n" * (before[-1:] not in ("", "\n"))
    with path.open("a", encoding="utf-8") as file:
        file.write(ending + "".join(f"{line}\n" for line in missing))
    render.talk(f"added {', '.join(missing)} to {path}" if before else f"wrote {path}")
