"""The command ``allranks``: finds the verb, runs it, and shows its error."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from allranks import __version__
from allranks.cli import render
from allranks.errors import AllranksError, UsageError

#: Verbs in the order of the help, by group. Each is a module of this package, imported when it is used.
GROUPS = {
    "Run a job": {
        "init": "Write a commented job.yaml and a train.py to start from.",
        "plan": "Show what would run, and why.",
        "run": "Run a job and follow all its ranks.",
        "resume": "Resume a run that ended early.",
        "cancel": "Cancel a run.",
    },
    "Follow runs": {
        "ps": "List runs.",
        "status": "Show the status of a run.",
        "logs": "Show or follow the output of the ranks.",
        "watch": "Watch runs live, on the full screen.",
        "stacks": "Show where the ranks stand, in a hang.",
        "why": "Explain why a run failed, or any PyTorch log.",
        "top": "Show the CPU, memory and GPU use of a run.",
        "metrics": "Write the metrics of runs for Prometheus.",
        "compare": "Compare the speed, metrics and settings of runs.",
        "report": "Write a report on runs as one HTML file.",
    },
    "Check first": {
        "check": "Check this machine, or all nodes of a job.",
        "test": "Run a short distributed training as a self-test.",
        "estimate": "Estimate the memory and traffic of a job.",
        "lint": "Find faults in launch scripts that you have.",
        "convert": "Turn launch scripts into job files.",
    },
    "Use clusters": {
        "shell": "Open a shell on nodes of a cluster.",
        "node": "Start one node of a job by hand.",
    },
    "Manage files": {
        "checkpoint": "List, check and export checkpoints.",
        "prune": "Remove old runs.",
        "schema": "Print the JSON Schema of the job file.",
        "completion": "Print the shell completion for bash, zsh or fish.",
    },
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
_EPILOG = "allranks COMMAND --help describes a command and its options."

#: Words of other tools that mean exactly the same.
SAME = {"ls": "ps", "list": "ps", "stop": "cancel", "kill": "cancel", "help": "--help", "version": "--version"}

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Verbs(click.Group):
    """The group of verbs, which imports only the verb that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the help."""
        return VERBS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace words of other tools with ours; ``help VERB`` is ``VERB --help``."""
        if args[:1] == ["help"] and len(args) > 1:
            args = [*args[1:], "--help"]
        if args and args[0] in SAME:
            args = [SAME[args[0]], *args[1:]]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"allranks.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; an error names the one that may be meant."""
        word = args[0]
        if not word.startswith("-") and word.replace("_", "-") not in VERBS and not ctx.resilient_parsing:
            from allranks.cli.usage_errors import unknown_verb

            raise unknown_verb(word, VERBS)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the verb; if the reader of its results is gone, exit as a process that SIGPIPE ended."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            ctx.exit(141)  # Here, for click itself would make it 1.

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:10}", what) for verb, what in verbs.items()])


@click.group(cls=Verbs, context_settings=CONTEXT, invoke_without_command=True, epilog=_EPILOG)
@click.version_option(__version__, "--version", "-V", message="allranks %(version)s", help="Show the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run a PyTorch training script on every rank: here, over SSH, on Slurm, PBS and Grid Engine.

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
        from allranks.cli.usage_errors import from_click

        render.error(from_click(error, cli, sys.argv[1:] if argv is None else argv))
        code = 2
    except Exception as error:  # noqa: BLE001 - the last resort: the traceback goes to a file, not to the user
        render.error(render.unexpected(error))
        code = 1
    render.flush()
    sys.exit(code if isinstance(code, int) else 0)
