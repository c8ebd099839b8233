"""``messages.txt``: what a user types that cannot work, and the message that answers it.

A block begins with ``== title``. Its lines that start with ``$`` are commands, which ``>`` continues; what stands below
``$ allranks ...`` is its exit code and stderr. A block's directory has an empty ``train.py`` and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("messages.txt")
_TITLE = "== "


@dataclass(frozen=True)
class Step:
    """One command of a block.

    Attributes:
        command: bash, of one or more lines.
        output: the lines that stand below it.
    """

    command: str
    output: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether it calls allranks, perhaps with variables of its environment before it."""
        return bool(re.match(r"(\w+=\S* )*allranks( |$)", self.command))

    def lines(self) -> list[str]:
        """Return it as it stands in the file."""
        first, *rest = self.command.split("\n")
        return [f"$ {first}", *(f"> {line}" for line in rest), *self.output]


@dataclass(frozen=True)
class Block:
    """One block of the file: a title, commands, and the lines between it and the next block."""

    title: str
    steps: tuple[Step, ...]
    after: str

    def __str__(self) -> str:
        lines = [f"{_TITLE}{self.title}", *(line for step in self.steps for line in step.lines())]
        return "\n".join(lines) + "\n" + self.after


def read_blocks(text: str) -> tuple[str, list[Block]]:
    """Return what stands before the first block, and all blocks."""
    first, *rest = re.split(f"^{_TITLE}", text, flags=re.MULTILINE)
    return first, [_block(each) for each in rest]


def replace_block(text: str, block: Block) -> str:
    """Return the text of the file with another version of one block."""
    first, blocks = read_blocks(text)
    return first + "".join(str(block if each.title == block.title else each) for each in blocks)


def _block(text: str) -> Block:
    head, blank, after = text.partition("\n\n")
    title, *lines = head.rstrip("\n").split("\n")
    steps: list[Step] = []
    for line in lines:
        if line.startswith("$ "):
            steps.append(Step(line[2:]))
        elif line.startswith("> "):
            steps[-1] = Step(f"{steps[-1].command}\n{line[2:]}")
        else:
            steps[-1] = Step(steps[-1].command, (*steps[-1].output, line))
    return Block(title, tuple(steps), "\n" + after if blank else "")
