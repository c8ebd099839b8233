"""Why torch's own launcher ended: what it wrote was recorded with PyTorch 1.8 and 2.13."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.logs.cause import launcher_causes

RANK = """\
Traceback (most recent call last):
  File "train.py", line 11, in <module>
    raise ValueError("boom")
ValueError: boom
"""
OLD = """\
Traceback (most recent call last):
  File "/lib/python3.6/runpy.py", line 193, in _run_module_as_main
    "__main__", mod_spec)
  File "/lib/python3.6/site-packages/torch/distributed/launch.py", line 301, in sigkill_handler
    raise subprocess.CalledProcessError(returncode=last_return_code, cmd=cmd)
subprocess.CalledProcessError: Command '['python', '-u', 'train.py']' returned non-zero exit status 1.
"""
WARNING = """\
/lib/python3.11/site-packages/torch/distributed/launch.py:207: FutureWarning: The module torch.distributed.launch is deprecated
and will be removed in future. Use torchrun.

  main()
"""  # noqa: E501
NEW = """\
E1121 23:29:35.734000 4308 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 7) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_23:29:35
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4318)
============================================================
"""
MODULE = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/project/my/module.py", line 3, in <module>
KeyError: 'lr'
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (RANK + OLD, ["ValueError: boom (train.py:11)"]),
        (WARNING + RANK + "terminate called without an active exception\n" + NEW, ["ValueError: boom (train.py:11)"]),
        (WARNING, []),
        (MODULE + NEW, ["KeyError: 'lr' (module.py:3)"]),
        (WARNING + NEW.format(code=7), ["rank 1 exited with code 7"]),
        (NEW.format(code=-9), ["rank 1 was killed by SIGKILL"]),
        (OLD, []),
    ],
    ids=["nothing", "1.8", "2.13", "a warning", "a module", "a code", "a signal", "1.8 says no more"],
)
def test_launcher_causes(tmp_path: Path, text: str, expected: list[str]):
    log = tmp_path / "node.err"
    log.write_text(text)
    assert launcher_causes(log) == expected


def test_no_log(tmp_path: Path):
    assert launcher_causes(tmp_path / "node.err") == []
