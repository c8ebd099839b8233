"""What a traceback shows where its last line alone says too little, and how sure that makes a verdict."""

from __future__ import annotations

import re

import pytest
from test_verdict import TRACEBACK, verdict

from allranks.diagnosis.sources import of_text


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("assert torch.cuda.is_available()", "gpu-not-available"),
        ("assert torch.cuda.device_count() >= 8", "gpu-invalid-ordinal"),
        ("assert torch.distributed.is_initialized()", "not-initialized"),
        ("assert args.world_size % args.tensor_model_parallel_size == 0", "parallel-sizes"),
        ("assert os.path.exists(args.data)", "file-not-found"),
        ("assert q.dtype in [torch.float16, torch.bfloat16]", "dtype-mismatch"),
        ("assert x.shape[1] == self.dim", "shape-mismatch"),
        ("assert not torch.isnan(loss)", "not-a-number"),
    ],
)
def test_an_assertion_without_a_message_is_known_by_its_condition_and_never_certain(
    condition: str, expected: str
) -> None:
    found = verdict(
        f'Traceback (most recent call last):\n  File "t.py", line 9, in f\n    {condition}\nAssertionError\n'
    )
    assert (found.id, found.sure) == (expected, "likely")


OVERRIDE = """Traceback (most recent call last):
  File "/v/site-packages/omegaconf/base.py", line 797, in _format_and_raise
omegaconf.errors.ConfigAttributeError: Key 'numworkers' is not in struct
    full_key: data.numworkers
    object_type=dict

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/site-packages/hydra/_internal/config_loader_impl.py", line 397, in _apply_overrides_to_config
hydra.errors.ConfigCompositionException: Could not override 'data.numworkers'.
To append to your config use +data.numworkers=8
"""


def test_a_key_that_an_override_lacks_is_an_argument_and_one_that_the_script_reads_is_not() -> None:
    found = verdict(OVERRIDE)
    assert (found.id, found.sure) == ("arguments", "certain")
    found = verdict("".join(OVERRIDE.partition("\n\n")[:1]))
    assert (found.id, found.cause) == ("configuration-key", "the configuration has no key numworkers")


OF_ELSEWHERE = """AssertionError: bad|AssertionError|Exception: bad|ValueError: no such model|KeyError: 'lr'
AttributeError: 'Trainer' object has no attribute 'x'|TypeError: f() missing 1 required positional argument: 'x'
IndexError: list index out of range|UnicodeDecodeError: 'utf-8' codec can't decode byte 0x81"""


@pytest.mark.parametrize("error", re.split(r"[|\n]", OF_ELSEWHERE))
def test_an_exception_that_may_come_from_elsewhere_is_never_certain(error: str) -> None:
    found = verdict(TRACEBACK.format(file="train.py", line=9, error=error))
    assert (found.id, found.sure) == ("script-exception", "likely")


@pytest.mark.parametrize(
    "error",
    ["NameError: name 'weigths' is not defined", "UnboundLocalError: x", "ZeroDivisionError: division by zero"],
)
def test_an_exception_of_the_code_itself_is_certain(error: str) -> None:
    found = verdict(TRACEBACK.format(file="train.py", line=9, error=error))
    assert (found.id, found.sure, found.place) == ("script-exception", "certain", "train.py:9")


def test_an_assertion_of_something_else_is_an_exception_of_the_script() -> None:
    frames = 'Traceback (most recent call last):\n  File "t.py", line 9, in f\n    assert not os.path.exists(p)\n'
    found = verdict(f"{frames}AssertionError\n")
    assert (found.id, found.sure) == ("script-exception", "likely")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("raise FileNotFoundError(", "file-not-found"),
        ("raise ValueError(", "script-exception"),
        ("raise CalledProcessError(retcode, process.args,", "library-exception"),
        ('raise RuntimeError("Ninja is required to load C++ extensions")', "compiler-missing"),
    ],
)
def test_a_log_that_ends_within_a_traceback_is_told_by_what_is_raised_and_never_certain(
    last: str, expected: str
) -> None:
    cut = f'Traceback (most recent call last):\n  File "/home/ada/train.py", line 9, in f\n    {last}\n'
    found = verdict(f"{cut}\n")
    assert (found.id, found.sure, found.place) == (expected, "likely", "train.py:9")
    assert of_text(f"{cut}KeyError: 1\n".encode()) != found


def test_an_exception_is_found_in_a_traceback_that_is_indented() -> None:
    indented = (
        '    Traceback (most recent call last):\n      File "/home/ada/train.py", line 9, in f\n    KeyError: 1\n'
    )
    found = verdict(indented)
    assert (found.id, found.sure, found.place) == ("script-exception", "likely", "train.py:9")
    assert of_text(indented.replace("    KeyError", "          KeyError").encode()) is None


def test_a_column_of_a_table_is_no_variable_of_a_rank() -> None:
    frame = "Traceback (most recent call last):\n  File \"{}\", line 9, in f\nKeyError: 'RANK'\n"
    found = [of_text(frame.format(name).encode()) for name in ("/x/pandas/core/indexes/base.py", "/usr/lib/os.py")]
    assert [each and each.id for each in found] == ["script-exception", "rank-variables"]
