"""The state of each part of a checkpoint, split into tensors and a skeleton.

The skeleton is the state with a placeholder for each tensor: a dict with one key, which holds the tensor's name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RankError
from allranks.runtime.call_errors import meant_by
from allranks.runtime.model.flat_gradients import unwrap

PLACEHOLDER = "allranks.tensor"
#: Types that torch.load(weights_only=True) accepts and that are portable between machines.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
# Learning-rate schedulers hold one; later versions of torch accept it by default.
torch.serialization.add_safe_globals([Counter])


class StatePart:
    """An object with ``state_dict`` and ``load_state_dict``, under the name that the script gives it.

    Attributes:
        kind: ``module``, ``optimizer`` or ``other``.
        held: the object without wrappers, so that keys do not depend on the number of ranks.
        replicated: whether it is a model that data parallelism keeps equal on all ranks.
    """

    def __init__(self, name: str, given: Any, options: Iterable[str] = ()) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(given, method, None)):
                raise RankError(
                    f"ctx.checkpoints({name}=...): {type(given).__name__} has no {method}()",
                    why="what is not an option is something to save",
                    fix=meant_by(name, options)
                    or "give models, optimizers, schedulers, loaders, or objects of yours with both methods; "
                    "plain values go into config=",
                )
        self.name = name
        self.held: Any = given
        self.replicated = False
        self.kind = "optimizer" if hasattr(given, "param_groups") else "other"
        if isinstance(given, nn.Module):
            self.kind = "module"
            self.replicated = unwrap(given) is not given
            outer = None
            while outer is not self.held:  # ctx.prepare, DistributedDataParallel and torch.compile wrap in any order.
                outer, self.held = self.held, unwrap(getattr(self.held, "_orig_mod", self.held))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of a model, or of an optimizer in the order of its state."""
        if self.kind == "module":
            return list(self.held.parameters())
        if self.kind == "optimizer":
            return [parameter for group in self.held.param_groups for parameter in group["params"]]
        return []

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the parameters, which the state of an optimizer does not hold."""
        return [list(parameter.shape) for parameter in self.parameters()]


def split(part: str, state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the skeleton of ``state``, and its tensors by name: the keys that lead to them, joined by ``/``."""
    tensors: dict[str, Tensor] = {}
    return _skeleton(state, part, tensors), tensors


def _skeleton(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _placeholder(value.detach(), path, tensors)
    if isinstance(value, dict):
        if PLACEHOLDER in value:
            raise _not_plain(path, f"the key {PLACEHOLDER!r} is reserved")
        items = {}
        for key, child in value.items():
            if type(key) not in _PLAIN and not (type(key) is tuple and all(type(item) in _PLAIN for item in key)):
                raise _not_plain(path, f"it has the key {key!r}")
            items[key] = _skeleton(child, f"{path}/{key}", tensors)
        if isinstance(value, Counter):
            return Counter(items)
        if not isinstance(value, OrderedDict):
            return items
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


def _placeholder(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.cpu().clone()  # torch.save can write these.
    if tensor.is_meta:
        raise _not_plain(path, "it is a tensor without data, on the device meta")
    name = path
    while name in tensors:  # For example the keys 1 and "1".
        name += "'"
    tensors[name] = tensor
    return {PLACEHOLDER: name}


def _not_plain(path: str, why: str) -> RankError:
    return RankError(
        f"the state of {path.replace('/', '.')} cannot be saved",
        why=why,
        fix="let state_dict() give numbers, text, lists, dicts and tensors only",
    )


def names_in(skeleton: Any) -> list[str]:
    """Return the names of the tensors in a skeleton, each once."""
    names: dict[str, None] = {}
    join(skeleton, names.setdefault)
    return list(names)


def join(skeleton: Any, tensor: Callable[[str], Tensor | None]) -> Any:
    """Return the state, with ``tensor(name)`` for each placeholder."""
    if isinstance(skeleton, dict):
        if PLACEHOLDER in skeleton:
            return tensor(skeleton[PLACEHOLDER])
        filled = type(skeleton)({key: join(child, tensor) for key, child in skeleton.items()})
        if hasattr(skeleton, "_metadata"):
            filled._metadata = skeleton._metadata  # type: ignore[attr-defined]
        return filled
    if type(skeleton) in (list, tuple, set):
        return type(skeleton)(join(child, tensor) for child in skeleton)
    return skeleton
