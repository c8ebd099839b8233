"""``allranks completion``: what a shell needs to complete our words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from allranks.cli import render

_HOW = {
    "bash": 'eval "$(allranks completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(allranks completion zsh)"    # in ~/.zshrc',
    "fish": "allranks completion fish > ~/.config/fish/completions/allranks.fish",
}


@click.command("completion")
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(list(_HOW)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the completion for a shell."""
    maker = get_completion_class(shell)
    assert maker is not None
    render.data(maker(ctx.find_root().command, {}, "allranks", "_ALLRANKS_COMPLETE").source())
    render.talk(f"next: {_HOW[shell]}")
    return 0
