"""Scripts of csh, line by line as bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from allranks.convert.csh import as_bash, is_csh
from allranks.errors import UsageError

#: A line of csh, and the same of bash.
LINES = {
    "set a = 1": "a=1",
    "set b=two;": "b=two",
    '  set c = "three words"   # why': '  c="three words"',
    "set d = `pwd`/x": "d=`pwd`/x",
    "set e = (x y z)": 'e="x y z"',
    "set empty": "empty=",
    "setenv A $a": "export A=$a",
    "setenv B 'x y'": "export B='x y'",
    "setenv C": "export C=",
    "unsetenv C": "unset C",
    "@ n = $a + 4 * 2": "n=$(($a + 4 * 2))",
    "set f = $argv[2]": "f=$2",
    "python train.py $argv": "python train.py $*",
    "python train.py >>& log": "python train.py >> log 2>&1",
    "foreach i ( $e )": "for i in $e; do",
    "end": "done",
    "if ( $?A ) then": 'if [ -n "${A+set}" ]; then',
    "if (! $?A) echo no": 'if [ -z "${A+set}" ]; then echo no; fi',
    "else if ( $#argv > 1 ) then": 'elif [ "$#" -gt 1 ]; then',
    'if ( "$b" == "two" && $n >= 9 ) then': 'if [ "$b" = "two" ] && [ "$n" -ge 9 ]; then',
    "if ( ! -d /data ) setenv D none": "if [ ! -d /data ]; then export D=none; fi",
    "endif": "fi",
    "source /etc/profile.d/modules.csh": ":",
    "source env/bin/activate.csh": "source env/bin/activate",
    "module load cuda": "module load cuda",
}
BEYOND = [
    *("switch ($a)", "set x = $y[1]", "set x = $f:r", "@ i++", "if ( { true } ) then", "source other.csh"),
    *("while ( $i < 3 )", "limit stacksize unlimited", "set x = `ls` y", "if ($x == 1) alias a b", "echo $<"),
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_written_as_bash_does(line: str) -> None:
    text = f"#!/bin/csh\n# set x = (\n{line}\n"
    assert as_bash("start.csh", text.encode()).decode() == f"#!/bin/bash\n# set x = (\n{LINES[line]}\n"


def test_a_here_document_is_left_as_it_is() -> None:
    text = "#!/bin/csh\ncat > a << EOF\nset x = 1\nEOF\nset x = 1\n"
    assert as_bash("start", text.encode()).decode() == "#!/bin/bash\ncat > a << EOF\nset x = 1\nEOF\nx=1\n"


@pytest.mark.parametrize("line", BEYOND)
def test_a_line_without_a_counterpart_is_refused(line: str) -> None:
    with pytest.raises(UsageError) as raised:
        as_bash("start.csh", f"#!/bin/tcsh\n{line}\n".encode())
    assert raised.value.why == f"start.csh:2: {line}: a line of csh that bash has no line for"


def test_csh_is_known_by_its_first_line_by_qsub_or_by_its_name() -> None:
    for text in (b"#!/bin/csh -f\n", b"#!/usr/bin/env tcsh\n", b"#PBS -S /bin/csh\n", b"#$ -S /bin/tcsh\n"):
        assert is_csh("start", text)
    assert is_csh("start.csh", b"setenv A 1\n")
    for text in (b"#!/bin/bash\n#PBS -S /bin/csh\n", b"setenv A 1\n", b"#PBS -S /bin/bash\n"):
        assert not is_csh("start.sh", text)


@pytest.mark.skipif(shutil.which("tcsh") is None, reason="needs tcsh")
def test_bash_prints_what_tcsh_prints(tmp_path: Path) -> None:
    script = tmp_path / "start.csh"
    script.write_text(
        '#!/bin/tcsh -f\nset a = 1\nset b=two;\nset e = (x y z)\nset f = ($argv)\nsetenv B "$b and $a"\n'
        "@ n = $a + 4 * 2\nif ( $?B ) then\n  echo has B\nendif\nif (! $?NOPE) echo no NOPE\n"
        "if ( $?NOPE ) then\n  echo bad\nelse if ( $#argv > 1 ) then\n  echo many $#argv $argv[1]\n"
        "else\n  echo few\nendif\n"
        'if ( "$b" == "two" && $n >= 9 ) then\n  echo both\nendif\nif ( -e /etc/passwd ) echo there\n'
        "if ( ! -d /nonexistent ) setenv D missing\nforeach i ( $e )\n  echo loop $i\nend\nfalse\necho status $status\n"
        "cat << EOF\nset x = inner $a\nEOF\necho $a $b $e $f $n $D\nprintenv B\n"
    )
    copy = tmp_path / "start.sh"
    copy.write_bytes(as_bash("start.csh", script.read_bytes()))
    old, new = (
        subprocess.run([*words, "one", "two"], capture_output=True, text=True, check=True).stdout
        for words in (["tcsh", "-f", str(script)], ["bash", str(copy)])
    )
    assert (new, len(new.splitlines())) == (old, 12)
