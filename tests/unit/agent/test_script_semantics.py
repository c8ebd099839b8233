"""A rank's script finds what a plain `python train.py` gives it, and ends as it would end there."""

from __future__ import annotations

import json
import re

import pytest

IDENTITY = """\
"The docstring."
import json, signal, sys
main = sys.modules["__main__"]
print(json.dumps({
    "name": __name__, "file": __file__, "doc": __doc__, "package": __package__, "spec": repr(__spec__),
    "cached": __cached__, "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
    "annotations": __annotations__, "names": sorted(name for name in globals()),
    "main": main.__dict__ is globals(), "main_file": main.__file__,
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "flags": repr(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix, "warnoptions": sys.warnoptions,
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.closed) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "dunder_streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "stdin": sys.stdin.read(), "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
    "trace": sys.gettrace() is None, "excepthook": sys.excepthook is sys.__excepthook__,
}))
"""

MODULE = """\
import json, sys
print(json.dumps([
    __name__, __file__, __package__, __spec__.name, __spec__.origin, sys.argv, sys.path, sys.orig_argv[1:],
    sys.modules["__main__"].__dict__ is globals(),
]))
"""

ENDS = {
    "nothing": "pass",
    "exit 3": "import sys; sys.exit(3)",
    "exit 259": "import sys; sys.exit(259)",
    "exit text": "import sys; sys.exit('no such data')",
    "exit None": "import sys; print('x'); sys.exit(None)",
    "exit False": "import sys; sys.exit(False)",
    "quit": "quit(4)",
    "os._exit": "import os; os._exit(7)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "SIGHUP": "import os; os.kill(os.getpid(), 1)",
    "SIGUSR1": "import os; os.kill(os.getpid(), 10)",
    "real-time signal": "import os; os.kill(os.getpid(), 37)",
    "abort": "import os; os.abort()",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(10**6)]",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "interrupt, handled": "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    raise SystemExit(5)",
    "error": "def f(n):\n    return 1 // n\n\nf(0)\n",
    "error with a cause": "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('b') from e\n",
    "error with a context": "try:\n    {}['a']\nexcept KeyError:\n    raise RuntimeError('b')\n",
    "error group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "error in a callback": "import functools\nfunctools.reduce(lambda a, b: a / b, [1, 0])\n",
    "base exception": "class Odd(BaseException):\n    pass\n\nraise Odd('x')\n",
    "syntax": "print(1)\nif True\n    pass\n",
    "indentation": "if True:\npass\n",
    "import error": "import nothing_of_that_name\n",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno)\n1 / 0\n",
    "excepthook, None": "import sys\nsys.excepthook = None\n",
    "error in excepthook": "import sys\ndef hook(*a):\n    raise ValueError('hook')\nsys.excepthook = hook\n",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0\n",
    "traceback module": "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'last')\n1 / 0\n",
    "error in atexit": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('done'))).start()\n",
    "daemon": "import threading, time\nthreading.Thread(target=lambda: time.sleep(60), daemon=True).start()\n",
    "error in a thread": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()\n",
    "output unflushed": "import sys\nsys.stdout.write('no newline'); sys.stderr.write('neither')\n",
    "bytes": "import sys\nsys.stdout.buffer.write(b'\\xff\\n')\n",
    "surrogate": "print('\\udcff')\n",
    "unraisable": "class C:\n    def __del__(self):\n        1 / 0\nc = C()\ndel c\n",
    "warning": "import warnings\nwarnings.warn('w')\n",
    "logging": "import logging\nlogging.basicConfig(format='%(lineno)d %(filename)s')\nlogging.error('e')\n",
    "pickle of main": "import pickle\nclass C:\n    pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)\n",
    "faulthandler": "import faulthandler\nprint(faulthandler.is_enabled())\n",
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold())\n",
    "threads": "import threading as t\nprint(t.current_thread() is t.main_thread(), t.enumerate())\n",
    "locale": "import locale\nprint(locale.setlocale(locale.LC_ALL, None), locale.getpreferredencoding(False))\n",
}


def test_a_script_finds_itself(rank, mode):
    path = rank.script(IDENTITY)
    expected, got = rank.python(path, "--lr", "0.1 "), rank(path, "--lr", "0.1 ", **mode)
    assert json.loads(got.out) == json.loads(expected.out)
    assert (got.code, got.err) == (0, "")


def test_a_script_behind_a_link_finds_the_folder_it_lies_in(rank, mode):
    rank.script("value = 41", "real/beside.py")
    rank.script("import beside, sys; print(beside.value, sys.path[0], __file__)", "real/train.py")
    link = rank.folder / "link.py"
    link.symlink_to("real/train.py")
    assert rank(str(link), **mode).out == f"41 {rank.folder}/real {link}\n"
    assert rank.python(str(link)).out == f"41 {rank.folder}/real {link}\n"


def test_safe_path_leaves_out_the_scripts_folder(rank, mode):
    rank.env["PYTHONSAFEPATH"] = "1"
    path = rank.script("import sys; print(sys.path)")
    # The harness itself is started with a safe path, as the agent is not: its first entry is the interpreter's.
    expected = rank.python(path)
    assert str(rank.folder) not in expected.out
    assert str(rank.folder) not in rank(path, **mode).out


@pytest.mark.parametrize("target", ["pkg.mod", "pkg", "nothing.here", "pkg.broken"])
def test_a_module_finds_itself(rank, mode, target):
    for name in ("__init__", "mod", "__main__"):
        rank.script(MODULE if name != "__init__" else "", f"pkg/{name}.py")
    rank.script("1 / 0", "pkg/broken.py")
    expected, got = rank.python("-m", target, "a", "-b"), rank(target, "a", "-b", kind="module", **mode)
    assert (got.code, got.out, got.err) == (expected.code, expected.out, expected.err)
    assert expected.out or expected.err


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_a_plain_interpreter(rank, mode, name):
    path = rank.script(ENDS[name])
    expected, got = rank.python(path), rank(path, **mode)
    said = [(one.code, _addresses_apart(one.out), _addresses_apart(one.err)) for one in (expected, got)]
    assert said[1] == said[0]


def _addresses_apart(text):
    return re.sub("0x[0-9a-f]+|(?<=started )[0-9]+", "0x", text)


EXACT = {
    "exit 3": (3, ""),
    "exit 259": (3, ""),
    "exit text": (1, "no such data\n"),
    "exit None": (0, ""),
    "os._exit": (7, ""),
    "SIGKILL": (-9, ""),
    "real-time signal": (-37, ""),
}


@pytest.mark.parametrize("name", EXACT)
def test_exit_codes_are_those_that_people_know(rank, name):
    got = rank(rank.script(ENDS[name]))
    assert (got.code, got.err) == EXACT[name]


def test_keyboard_interrupt_kills_by_sigint_and_shows_only_the_scripts_frames(rank):
    path = rank.script("raise KeyboardInterrupt")
    got = rank(path)
    shown = f'Traceback (most recent call last):\n  File "{path}", line 1, in <module>\n'
    assert got.code == -2
    assert got.err == f"{shown}    raise KeyboardInterrupt\nKeyboardInterrupt\n"


def test_a_missing_script_is_an_error_of_the_rank(rank):
    got = rank(str(rank.folder / "gone.py"))
    assert got.code == 1
    assert got.err.splitlines()[-1].startswith("FileNotFoundError: [Errno 2] No such file or directory")
