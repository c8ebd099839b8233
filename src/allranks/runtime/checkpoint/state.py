"""Taking a state apart into tensors and the rest, and putting it together again.

The rest is the state with a stand-in for each tensor: a dict with one key, which holds the tensor's name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RankError

STAND_IN = "allranks.tensor"
#: Types that torch.load(weights_only=True) takes, and that mean the same wherever they are read.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
# Schedulers hold one; later torch takes it by itself.
torch.serialization.add_safe_globals([Counter])


def take_apart(part: str, state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``state`` with stand-ins, and its tensors by name: the keys that lead to them, joined by ``/``.

    Raises:
        RankError: a value is neither plain nor a tensor; it names the key.
    """
    tensors: dict[str, Tensor] = {}
    return _skeleton(state, part, tensors), tensors


def _skeleton(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _stand_in(value.detach(), path, tensors)
    if isinstance(value, dict):
        if STAND_IN in value:
            raise _not_plain(path, f"the key {STAND_IN!r} is reserved")
        items = ((_key(key, path), _skeleton(child, f"{path}/{key}", tensors)) for key, child in value.items())
        if isinstance(value, Counter):
            return Counter(dict(items))  # Of pairs it would count the pairs.
        if not isinstance(value, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        if hasattr(value, "_metadata"):  # Versions of the modules' states.
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered
    if type(value) in (list, tuple, set):
        return type(value)(_skeleton(child, f"{path}/{index}", tensors) for index, child in enumerate(value))
    if type(value) in _PLAIN:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _skeleton(value.item(), path, tensors)
    raise _not_plain(path, f"it is a {type(value).__module__}.{type(value).__qualname__}")


def _stand_in(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.cpu().clone()  # torch.save knows how.
    if tensor.is_meta:
        raise _not_plain(path, "it is a tensor without data, on the device meta")
    name = path
    while name in tensors:  # The keys 1 and "1", say.
        name += "'"
    tensors[name] = tensor
    return {STAND_IN: name}


def _key(key: Any, path: str) -> Any:
    if type(key) in _PLAIN or (type(key) is tuple and all(type(item) in _PLAIN for item in key)):
        return key
    raise _not_plain(path, f"it has the key {key!r}")


def _not_plain(path: str, why: str) -> RankError:
    return RankError(
        f"the state of {path.replace('/', '.')} cannot be saved",
        why=why,
        fix="let state_dict() give numbers, text, lists, dicts and tensors only",
    )


def names_in(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors that stand in a skeleton."""
    if isinstance(skeleton, dict):
        if STAND_IN in skeleton:
            yield skeleton[STAND_IN]
            return
        skeleton = skeleton.values()
    elif not isinstance(skeleton, (list, tuple, set)):
        return
    for child in skeleton:
        yield from names_in(child)


def put_together(skeleton: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the state, with ``tensor(name)`` for each stand-in."""
    if isinstance(skeleton, dict):
        if STAND_IN in skeleton:
            return tensor(skeleton[STAND_IN])
        filled = type(skeleton)({key: put_together(child, tensor) for key, child in skeleton.items()})
        if hasattr(skeleton, "_metadata"):
            filled._metadata = skeleton._metadata  # type: ignore[attr-defined]
        return filled
    if type(skeleton) in (list, tuple, set):
        return type(skeleton)(put_together(child, tensor) for child in skeleton)
    return skeleton
