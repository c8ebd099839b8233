"""The reference page of what ``import allranks`` gives, made from the docstrings without importing torch.

The source is read, not run: signatures stand as they were written, and a login node can make the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType

SOURCE = Path(__file__).parents[1] / "src" / "allranks"
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):\n((?:(?: .*)?\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)
_ROLE = re.compile(r":(?:meth|func|class|attr):`~?([\w.]+)`")
_WIDTH = 100
_SPECIAL = ("__iter__", "__len__")

Function = ast.FunctionDef


@dataclass(frozen=True)
class Shown:
    """A class of the page.

    Attributes:
        name: the class.
        file: its source.
        value: the name that an object of it has in a training script; empty for an error.
        internal: its public names that are not for users, with spaces between them.
    """

    name: str
    file: str
    value: str = ""
    internal: str = ""


CLASSES = (
    Shown("Context", "runtime/context.py", "ctx", "closing"),
    Shown("Loader", "runtime/data/loader.py", "loader"),
    Shown("EvaluationLoader", "runtime/data/loader.py", "loader"),
    Shown("Checkpointer", "runtime/checkpoint/checkpointer.py", "checkpoints"),
    Shown("Resumed", "runtime/checkpoint/restore.py", "checkpoints.resumed"),
    Shown("Metrics", "runtime/metrics/__init__.py", "ctx.metrics", "start_step finish flush hand_over write"),
    Shown(
        "Progress",
        "runtime/progress.py",
        "ctx.progress",
        "abandon backwards start_backward blocks clock counted groups load_state_dict open plain state_dict weighed",
    ),
    Shown("CpuGroup", "runtime/exchange.py", "ctx.control", "release"),
    Shown("Tracker", "runtime/trackers/base.py", "tracker"),
    Shown(
        "ResumeCallback",
        "lightning.py",
        "resume",
        "on_load_checkpoint on_save_checkpoint on_train_batch_end on_train_batch_start on_train_end on_train_epoch_end "
        "on_train_start on_validation_start",
    ),
    Shown("AllranksError", "errors.py", internal="exit_code"),
    *(Shown(name, "errors.py") for name in ("RankError", "RankEnvironmentError", "DeviceError")),
)


def python_api() -> str:
    """Return the page: ``allranks.init``, then each class with its members."""
    headings = ["allranks.init"]
    for shown in CLASSES:
        headings += [shown.name, *(f"{shown.name}.{name}" for name in _members(shown))]
    write = _Writer(frozenset(headings))
    parts = list(write.function(_init(), "allranks.init", "allranks.init", "", "##"))
    for shown in CLASSES:
        parts += write.whole(shown)
    return "\n\n".join(parts)


def _tree(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def _init() -> Function:
    (found,) = (node for node in _tree("runtime/startup.py").body if isinstance(node, Function) and node.name == "init")
    return found


def _class(shown: Shown) -> ast.ClassDef:
    (found,) = (each for each in _tree(shown.file).body if isinstance(each, ast.ClassDef) and each.name == shown.name)
    return found


def _members(shown: Shown) -> dict[str, Function]:
    """Return the public methods and properties, also those that the class takes from other modules."""
    found: dict[str, Function] = {}
    for node in _class(shown).body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.If):  # TYPE_CHECKING: the names of functions that are imported later.
            found |= {
                each.targets[0].id: _imported(shown.file, each.value.id)
                for each in node.body
                if isinstance(each, ast.Assign)
                and isinstance(each.targets[0], ast.Name)
                and isinstance(each.value, ast.Name)
            }
    public = {name: node for name, node in found.items() if name in _SPECIAL or not name.startswith("_")}
    return {name: node for name, node in public.items() if name not in shown.internal.split()}


def _imported(file: str, name: str) -> Function:
    """Return a function that a file imports."""
    imports = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.ImportFrom) and node.module)
    (module,) = (node.module for node in imports if name in [alias.name for alias in node.names])
    path = SOURCE.parent.joinpath(*module.split("."))
    tree = _tree(str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")))
    (found,) = (node for node in tree.body if isinstance(node, Function) and node.name == name)
    return found


def _types(cls: ast.ClassDef) -> dict[str, str]:
    """Return the types of attributes: of fields, and of what the constructor sets."""
    fields = (node for node in ast.walk(cls) if isinstance(node, ast.AnnAssign))
    return {
        node.target.id if isinstance(node.target, ast.Name) else node.target.attr: _source(node.annotation)
        for node in fields
        if isinstance(node.target, ast.Name | ast.Attribute)
    }


def _sections(docstring: str) -> list[tuple[str, str]]:
    """Return title and body of each section of a docstring."""
    return _SECTION.findall(docstring + "\n")


def _source(node: ast.expr) -> str:
    text = ast.unparse(node)
    return re.sub(r"'([^'\"]*)'", r'"\1"', text)


@dataclass(frozen=True)
class _Writer:
    """Writes Markdown, with links to what has a heading on the page."""

    headings: frozenset[str]

    def whole(self, shown: Shown) -> Iterator[str]:
        """Yield a class with its members."""
        yield f"## `{shown.name}`"
        cls = _class(shown)
        base = cls.bases[0] if not shown.value and cls.bases else None
        if base is not None:
            yield f"Base: {self._linked(_source(base))}"
        text = ast.get_docstring(cls) or ""
        if shown.value:  # Users call no constructor but of errors.
            text = "".join(re.split(r"^Args:\n(?:(?: .*)?\n)+", text + "\n", flags=re.MULTILINE))
        yield from self._text(text, shown.name, _types(cls), shown.internal)
        for name, node in _members(shown).items():
            call = f"{shown.value}.{name}" if shown.value else name
            yield from self.function(node, f"{shown.name}.{name}", call, shown.name, "###")

    def function(self, node: Function, title: str, call: str, owner: str, level: str) -> Iterator[str]:
        """Yield a function, method or property."""
        decorators = {ast.unparse(each) for each in node.decorator_list}
        docstring = ast.get_docstring(node)
        if not docstring:
            raise ValueError(f"{title} has no docstring")
        yield f"{level} `{title}`"
        returns = _source(node.returns) if node.returns else "None"
        is_property = bool(decorators & {"property", "cached_property"})
        if is_property:
            yield _fence(f"{call}: {returns}")
        else:
            parameters = [*_parameters(node, method=bool(owner) and "staticmethod" not in decorators)]
            yield _fence(_call(call, parameters, returns))
            _check_names(title, docstring, parameters)
        if returns in self.headings:
            yield f"**{'Type' if is_property else 'Returns'}**: {self._linked(returns)}"
        yield from self._text(docstring, owner)

    def _text(
        self,
        docstring: str,
        owner: str,
        types: Mapping[str, str] = MappingProxyType({}),
        internal: str = "",
    ) -> Iterator[str]:
        """Yield the parts of a docstring."""
        text = _ROLE.sub(partial(self._role, owner), docstring).replace("``", "`")
        yield _SECTION.sub("", text + "\n").strip()
        for title, body in _sections(text):
            if title == "Returns":
                yield f"**Returns**: {' '.join(body.split())}"
                continue
            entries = _ENTRY.split(dedent(body).strip("\n"))
            lines = [
                f"- {self._entry(title, name, types)}: {' '.join(said.split())}"
                for name, said in zip(entries[1::2], entries[2::2], strict=True)
                if name not in internal.split()
            ]
            yield "\n".join([f"**{title}**", "", *lines])

    def _entry(self, title: str, name: str, types: Mapping[str, str]) -> str:
        if title == "Raises":
            return self._linked(name)
        return f"`{name}` (`{types[name]}`)" if name in types else f"`{name}`"

    def _role(self, owner: str, match: re.Match[str]) -> str:
        name = match[1]
        return self._linked(f"{owner}.{name}" if f"{owner}.{name}" in self.headings else name, name)

    def _linked(self, heading: str, text: str = "") -> str:
        shown = f"`{text or heading}`"
        # As GitHub and the site make anchors of headings.
        return f"[{shown}](#{heading.lower().replace('.', '')})" if heading in self.headings else shown


def _parameters(node: Function, *, method: bool) -> Iterator[str]:
    """Yield the parameters as they are written, without ``self``."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    missing = [None] * (len(plain) - len(args.defaults))
    for arg, default in [*zip(plain, [*missing, *args.defaults], strict=True)][method:]:
        yield _parameter(arg, default)
    if args.vararg:
        yield "*" + _parameter(args.vararg, None)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default)
    if args.kwarg:
        yield "**" + _parameter(args.kwarg, None)


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_source(arg.annotation)}" if arg.annotation else ""
    return f"{arg.arg}{annotation}" + (f" = {_source(default)}" if default is not None else "")


def _check_names(title: str, docstring: str, parameters: list[str]) -> None:
    """Check that a docstring with arguments has all of them.

    Raises:
        ValueError: it has not.
    """
    bodies = [body for kind, body in _sections(docstring) if kind == "Args"]
    said = [name for body in bodies for name in _ENTRY.findall(dedent(body))]
    taken = [name for each in parameters for name in re.findall(r"^\**(\w+)", each)]
    if bodies and said != taken:
        raise ValueError(f"the docstring of {title} describes {said}, and it takes {taken}")


def _call(name: str, parameters: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parameters)}) -> {returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f") -> {returns}"])


def _fence(text: str) -> str:
    return f"```python\n{text}\n```"
