"""Scripts with unusual sources and paths; the messages for those that cannot run are in tests/golden/messages.txt."""

from __future__ import annotations

from pathlib import Path


def test_source_in_an_encoding_that_it_names_is_no_error(allranks):
    allranks.script("# -*- coding: latin-1 -*-\nassert len('é') == 1\nprint('ok')\n".encode("latin-1"))
    result = allranks("run", "train.py")
    assert (result.rc, result.stdout) == (0, "[0] ok\n")


def test_warnings_of_the_compiler_are_the_ranks_own(allranks):
    allranks.script("x = 1\nprint(x is 1)\n")
    assert "SyntaxWarning" not in allranks("plan", "train.py").stderr


def test_syntax_of_another_interpreter_is_not_judged(allranks):
    """The ranks' Python may know what ours does not."""
    allranks.script("this is newer\n")
    assert allranks("plan", "train.py", "--python", "python9").rc == 0


def test_script_in_a_path_with_spaces_and_quotes(allranks, weird_tmp_path: Path):
    script = weird_tmp_path / 'it\'s "mine" $(touch pwned);.py'
    script.write_text("import sys\nprint(sys.argv, __file__)\n")
    result = allranks("run", script, "--", "a b", "$HOME")
    assert (result.rc, result.stdout) == (
        0,
        f"[0] {[str(script), 'a b', '$HOME']} {script}\n".replace("\n;", "\n[0] ;"),
    )
    assert not list(allranks.folder.rglob("pwned"))


def test_job_file_in_a_folder_with_a_weird_name(allranks, weird_tmp_path: Path):
    (weird_tmp_path / "train.py").write_text("import os\nprint(repr(os.getcwd()))\n")
    (weird_tmp_path / "job.yaml").write_text("script: train.py\n")
    result = allranks("run", weird_tmp_path / "job.yaml")
    assert (result.rc, result.stdout) == (0, f"[0] {str(weird_tmp_path)!r}\n")
    result = allranks("run", cwd=weird_tmp_path)
    assert (result.rc, result.stdout) == (0, f"[0] {str(weird_tmp_path)!r}\n")
    assert not list(weird_tmp_path.parent.rglob("pwned"))
