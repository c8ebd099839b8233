"""The script that pdsh runs on all machines of a run: it finds out which one it is on, and runs another there."""

from __future__ import annotations

import shlex

from allranks import contract
from allranks.plan import batch
from allranks.plan.script import comment

#: This script, and the file that start.sh reads secrets from, in the run's folder.
PDSH = "pdsh.sh"
#: The exit code where pdsh does not tell which machine is which, of those that :mod:`ssh_script` does not use.
NOT_NAMED = 71
#: What it says at last, before the exit code: pdsh's own words for that depend on how it reaches machines.
CODE = "allranks: exit code "


def finding(title: str, run_dir: str) -> str:
    """Write the script.

    Its arguments are the machine's name as pdsh has it, a script of the run's folder, a word such as ``gpu01=0,8`` for
    each machine with those arguments of the script that are for this machine, and the arguments that are for all.

    Args:
        title: one line on what this is.
        run_dir: absolute folder of the run.
    """
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(title)],
            [
                f"run={shlex.quote(run_dir)} host=$1 script=$2 words=",
                "shift 2",
                "while [[ ${1-} == *=* ]]; do",
                '  [[ ${1%%=*} != "$host" ]] || words=${1#*=}',
                "  shift",
                "done",
            ],
            [
                comment("secrets are there as long as nodes are started: pdsh passes no stdin on"),
                "input=/dev/null",
                f'[ ! -e "$run/{contract.SECRETS_FILE}" ] || input=$run/{contract.SECRETS_FILE}',
                'if [ -n "$words" ]; then',
                '  IFS=, read -ra words <<<"$words"',
                '  bash "$run/$script" "${words[@]}" "$@" <"$input"',
                "  code=$?",
                "else",
                '  echo "pdsh says that this is $host, and no node is called so:'
                ' it must put the name in for %h, as with PDSH_RCMD_TYPE=ssh" >&2',
                f"  code={NOT_NAMED}",
                "fi",
                f'echo "{CODE}$code"',
                'exit "$code"',
            ],
        ]
    )
