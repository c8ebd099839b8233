"""The command ``allranks``: finds the verb, runs it, and shows whatever error comes out of it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from allranks.cli import render
from allranks.errors import AllranksError, UsageError

#: Verbs in the order of the help: module in this package, and one line. Modules are imported when used.
VERBS = {
    "init": ("init", "Write a commented job.yaml and a train.py to start from."),
    "plan": ("plan", "Show what would be executed, and why."),
    "check": ("check", "Check this machine, or all that a job needs, on every node."),
    "test": ("test", "Run a short distributed training as a self-test."),
    "run": ("run", "Run a job and follow all its ranks."),
    "node": ("node", "Start one node of a job, where each node is started by hand."),
    "resume": ("resume", "Resume a run that ended early."),
    "shell": ("shell", "Wait for nodes of a cluster, and open a shell there."),
    "ps": ("ps", "List the runs here."),
    "status": ("status", "Show a run's status."),
    "top": ("top", "Show what a run uses of its nodes."),
    "logs": ("logs", "Show or follow the output of a run's ranks."),
    "cancel": ("cancel", "End a run."),
    "prune": ("prune", "Remove old runs."),
    "checkpoint": ("checkpoint", "List, check and export the checkpoints of a training."),
    "schema": ("schema", "Print the JSON Schema of the job file."),
    "completion": ("completion", "Print the shell completion for bash, zsh or fish."),
}

#: Words of other tools that mean exactly the same.
SAME = {
    "ls": "ps",
    "list": "ps",
    "stop": "cancel",
    "kill": "cancel",
    "help": "--help",
    "version": "--version",
}

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Verbs(click.Group):
    """The group of verbs, which imports only the verb that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the help."""
        return list(VERBS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take words of other tools for ours; ``help VERB`` is ``VERB --help``."""
        if args[:1] == ["help"] and len(args) > 1:
            args = [*args[1:], "--help"]
        if args and args[0] in SAME:
            args = [SAME[args[0]], *args[1:]]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a verb."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"allranks.cli.{VERBS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; say which one may be meant where there is none."""
        word = args[0]
        if not word.startswith("-") and word.replace("_", "-") not in VERBS and not ctx.resilient_parsing:
            from allranks.cli.usage import unknown_verb

            raise unknown_verb(word, list(VERBS))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the verb; when nobody reads its results any more, end as a shell tells of SIGPIPE."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            ctx.exit(141)  # Here, for click itself would make it 1.

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import allranks

        click.echo(f"allranks {allranks.__version__}")
        ctx.exit()


@click.group(cls=Verbs, context_settings=CONTEXT, invoke_without_command=True)
@click.option(
    "--version", "-V", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run a PyTorch training script with all its ranks: here, and wherever there are GPUs.

    allranks run train.py --nproc-per-node 2
    """
    if ctx.invoked_subcommand is None:
        render.talk(ctx.get_help())
        ctx.exit(UsageError.exit_code)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line; ends with the exit code that the README's table gives."""
    try:
        code = cli.main(args=argv, prog_name="allranks", standalone_mode=False)
    except SystemExit as end:  # Of a second signal.
        code = end.code
    except AllranksError as error:
        render.error(error)
        code = error.exit_code
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        from allranks.cli.usage import from_click

        render.error(from_click(error))
        code = 2
    except Exception as error:  # noqa: BLE001 - the last resort: the traceback goes to a file, not to the user
        render.error(render.unexpected(error))
        code = 1
    _leave(code)


def _leave(code: Any) -> NoReturn:
    render.flush()
    sys.exit(code if isinstance(code, int) else 0)
