"""Messages of shells in other languages: the rules know them by the English ones."""

from __future__ import annotations

import pytest

from allranks.diagnosis.languages import in_english
from allranks.diagnosis.sources import of_text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.sh: 行 84: torchrun：未找到命令", "a.sh: line 84: torchrun: command not found"),
        ("a.sh：第 8 行：torchrun：未找到命令", "a.sh: line 8: torchrun: command not found"),
        ("a.sh: ligne 5 : torchrun : commande introuvable", "a.sh: line 5: torchrun: command not found"),
        ("a.sh: Zeile 3: ./x: Keine Berechtigung", "a.sh: line 3: ./x: Permission denied"),
        ("a.sh: строка 2:    77 Убито               python a.py", "a.sh: line 2: 77 Killed               python a.py"),
        ("段错误 (核心已转储)", "Segmentation fault (核心已转储)"),
        ("cp: a: デバイスに空き領域がありません", "cp: a: No space left on device"),
        ("Le script est Tué: deux fois", "Le script est Tué: deux fois"),
        ("損失：0.3 未找到命令 3", "損失：0.3 未找到命令 3"),
    ],
)
def test_a_line_is_translated(line: str, expected: str) -> None:
    assert in_english(line) == expected


def test_the_evidence_is_the_line_as_it_was_written() -> None:
    found = of_text("开始\na.sh: 行 84: torchrun：未找到命令\n".encode())
    assert found
    assert (found.id, found.cause) == ("command-not-found", "a command, torchrun, is not there")
    assert [line.text for line in found.evidence] == ["a.sh: 行 84: torchrun：未找到命令"]
