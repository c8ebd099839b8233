"""What rank 0 hands to the others: read without running code, and only if a rank of this run has packed it."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch

from allranks import contract
from allranks.errors import LaunchError, RankError
from allranks.record.files import write_key
from allranks.runtime.exchange import SignedValues

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "a b")


class Number(float):
    """A number of a type of its own, as NumPy's are."""


@pytest.fixture
def signed(monkeypatch, tmp_path):
    """Give what a rank of a run has, of a generation."""

    def make(restart=0, known=bytes(32), attempt="0"):
        write_key(tmp_path / contract.KEY_FILE, known)
        monkeypatch.setenv(contract.RUN_DIR, str(tmp_path))
        monkeypatch.setenv(contract.ATTEMPT, attempt)
        return SignedValues(restart, CPU)

    return make


@pytest.mark.parametrize(
    "value",
    [
        None, True, 7, 0.5, 1j, "text", b"bytes", [1, [2]], (1, "a"), {1, 2}, {"a": [1], 2: None}, OrderedDict(a=1),
        {"nested": [({"deep": {3}},)]},
    ],
    ids=str,
)  # fmt: skip
def test_what_can_be_sent_comes_as_it_was(signed, value):
    ours = signed()
    opened = ours.unpack(ours.pack("main/0", value, "f"))
    assert (opened, type(opened)) == (value, type(value))


def test_numbers_of_numpy_come_as_those_of_python(signed):
    ours = signed()
    opened = ours.unpack(ours.pack("main/0", {"accuracy": numpy.float64(0.5), "steps": [numpy.int64(3)]}, "f"))
    assert (opened, type(opened["accuracy"]), type(opened["steps"][0])) == ({"accuracy": 0.5, "steps": [3]}, float, int)


def test_tensors_that_share_memory_do_so_again(signed):
    ours = signed()
    base = torch.arange(4.0)
    whole, part = ours.unpack(ours.pack("main/0", [base, base[1:3]], "f"))
    part[0] = 9.0
    assert whole.tolist() == [0.0, 9.0, 2.0, 3.0]
    weight = ours.unpack(ours.pack("main/0", torch.nn.Parameter(base), "f"))
    assert (type(weight), weight.tolist()) == (torch.nn.Parameter, base.tolist())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Path("/x"), "pathlib.PosixPath"),
        ([1, {"a": Path("/x")}], "pathlib.PosixPath"),
        ({Path("/x"): 1}, "pathlib.PosixPath"),
        (Number(1), "test_signed_values.Number"),
        (Pair(1, 2), "test_signed_values.Pair"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (numpy.zeros(2), "numpy.ndarray"),
        (len, "builtin_function_or_method"),
        (range(2), "range"),
    ],
)
def test_another_type_is_refused_with_the_way_out(signed, value, named):
    with pytest.raises(RankError) as caught:
        signed().pack("main/0", value, "ctx.on_main(f)")
    assert caught.value.what == f"what ctx.on_main(f) returned on rank 0 cannot be sent to the other ranks: {named}"
    assert caught.value.why == "another type could only be read by running code that it brings along"
    fix = "return numbers, texts, bytes, tensors, or lists, tuples, sets and dicts of them; or nothing"
    assert caught.value.fix == fix


def test_an_error_is_raised_as_it_was_told(signed):
    ours = signed()
    packed = ours.pack_error("main/0", {"what": "no data", "why": "a", "fix": None})
    assert (ours.is_authentic("main/0", packed), ours.is_error(packed)) == (True, True)
    with pytest.raises(RankError) as caught:
        ours.unpack(packed)
    assert (caught.value.what, caught.value.why, caught.value.fix) == ("no data", "a", None)


def test_only_a_rank_of_this_run_can_have_packed_it_and_for_this_place_only(signed):
    packed = signed().pack("main/0", 1, "f")
    assert signed().is_authentic("main/0", packed)
    assert not signed().is_authentic("main/1", packed)
    assert not signed(restart=1).is_authentic("main/0", packed)
    assert not signed(attempt="1").is_authentic("main/0", packed)
    assert not signed(known=bytes(range(32))).is_authentic("main/0", packed)
    assert not signed().is_authentic("main/0", packed[:-1] + b"x")
    assert not signed().is_authentic("main/0", b"")


def test_ranks_that_something_else_has_started_have_no_key_and_run_no_code_either(signed, monkeypatch, tmp_path):
    signed()
    monkeypatch.delenv(contract.RUN_DIR)
    ours = SignedValues(0, CPU)
    assert ours.unpack(ours.pack("main/0", [1], "f")) == [1]

    class Touch:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    stream = io.BytesIO()
    torch.save(Touch(), stream)
    for data, error in ((stream.getvalue(), pickle.UnpicklingError), (pickle.dumps(Touch()), RankError)):
        with pytest.raises(error):
            ours.unpack(ours._signed("main/0", b"V" + data))
    assert not (tmp_path / "ran").exists()


def test_a_key_that_is_none_is_named(signed, tmp_path):
    signed()
    (tmp_path / contract.KEY_FILE).write_text("no key")
    with pytest.raises(LaunchError, match="holds no key"):
        SignedValues(0, CPU)
