"""Values given by flags and by environment variables, as settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.job.options import LOG_LEVEL_PATH, OPTIONS, TARGET_FLAGS
from allranks.job.problems import Problem, did_you_mean, quoted
from allranks.job.secrets import PLACEHOLDER, secret_names
from allranks.job.sources import CHECKS_FOLDER, VARIABLES, Layer, Setting, Source, texts_of, variables_of

LEVELS = ("DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL", "NOTSET", "TRACE", "OFF")

#: Paths that are given on the command line are meant from where the command was typed.
_PATHS = ("workdir", "runs.folder", "environment.venv")

#: Values that begin with a path, which may be one of somebody's home.
_HOME_PATHS = (*_PATHS, "script", "binary", "environment.conda", "environment.python", CHECKS_FOLDER)

#: What a rank finds in its environment about its own run is no wish for a run that it starts.
_OF_THE_RUN = {"MASTER_ADDR", "MASTER_PORT", contract.BACKEND}


def flag_layer(flags: Mapping[str, object], environ: Mapping[str, str], cwd: Path, problems: list[Problem]) -> Layer:
    """Return the settings of flags given by path; what is None was not given."""
    spellings = TARGET_FLAGS | {option.path: option.flags[0] for option in OPTIONS}
    found: Layer = {}
    for path, value in flags.items():
        if value is None or value == ():
            continue
        source = Source("flag", _spelling(path, value, spellings[path]))
        if path == VARIABLES:
            found |= _variables(_texts(value), environ, source, problems)
        else:
            found |= _settings(path, value, source, cwd, problems)
    return found


def _spelling(path: str, value: object, flag: str) -> str:
    negative = next((option.off_flag for option in OPTIONS if option.path == path), None)
    return negative if value is False and negative else flag


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, Iterable) else []


def environment_layer(environ: Mapping[str, str], cwd: Path, problems: list[Problem]) -> Layer:
    """Return the settings of environment variables; one that is empty is not given."""
    inside = contract.RUN_ID in environ
    found: Layer = {}
    for option in OPTIONS:
        for name in option.variables:
            if environ.get(name) and not (inside and name in _OF_THE_RUN):
                value: Any = environ[name]
                found |= _settings(option.path, value, Source("environment", name), cwd, problems)
                break
    return found


def _settings(path: str, value: Any, source: Source, cwd: Path, problems: list[Problem]) -> Layer:
    if path == LOG_LEVEL_PATH:
        return _log_level(str(value), source, problems)
    is_path = path in _PATHS or (path == "environment.conda" and "/" in str(value))
    if is_path and not str(value).startswith("~"):
        value = str(cwd / str(value))
    return {path: Setting(value, source)}


def _log_level(value: str, source: Source, problems: list[Problem]) -> Layer:
    """Take DEBUG for debug. LOG_LEVEL itself is other programs': it must not slow a training down."""
    level = value.strip().upper()
    if source.kind == "flag" and level not in LEVELS:
        hint = did_you_mean(level, LEVELS) or "write DEBUG, or leave it out"
        problems.append(Problem(source.where, f"{quoted(value)} is no log level", fix=hint))
    return {"debug": Setting(True, source)} if level == "DEBUG" else {}


def _variables(pairs: Iterable[str], environ: Mapping[str, str], source: Source, problems: list[Problem]) -> Layer:
    found: Layer = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not given and name not in environ:
            what = f"{quoted(name)} is not set here"
            problems.append(Problem(source.where, what, fix=f"export it, or write {source.where} NAME=VALUE"))
            continue
        found[f"{VARIABLES}.{name}"] = Setting(value if given else environ[name], source)
    return found


def resolved(layer: Layer, cwd: Path, environ: Mapping[str, str]) -> Layer:
    """Return the settings with ``~`` expanded, and a script of the command line found from elsewhere.

    A script is relative to the working directory, but one that was typed is meant from where it was typed: it
    is made absolute where the command line or the environment sends the ranks to another folder.
    """
    home = environ.get("HOME", "")
    found = {
        path: replace(setting, value=_at_home(path, setting.value, home)) if path in _HOME_PATHS else setting
        for path, setting in layer.items()
    }
    script, workdir = found.get("script"), found.get("workdir")
    if script and workdir and script.source.kind == "flag" and workdir.value != str(cwd):
        found["script"] = replace(script, value=str(cwd / str(script.value)))
    return found


def _at_home(path: str, value: Any, home: str) -> Any:
    """Expand ``~`` and ``~name`` as a shell does; of a command line, in its first word."""
    if isinstance(value, list | tuple):
        return [_at_home("", value[0], home), *value[1:]] if value else value
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    user, slash, rest = value.partition("/")
    found = home if user == "~" and home else os.path.expanduser(user)  # noqa: PTH111 - may be no user's
    # Text of a command line is split into words later: a home with a space stays one.
    return (shlex.quote(found) if path == "environment.python" and found != user else found) + slash + rest


def fill_secrets(layer: Layer, environ: Mapping[str, str], problems: list[Problem]) -> Layer:
    """Put the caller's values where a record has ``<secret>``: a recorded job can be started again."""
    filled = dict(layer)
    for path, setting in layer.items():
        name = path.removeprefix(f"{VARIABLES}.")
        if name != path and setting.value == PLACEHOLDER:
            if name in environ:
                filled[path] = replace(setting, value=environ[name])
            else:
                problems.append(_not_set(name, setting))
        elif any(PLACEHOLDER in text for text in texts_of(setting.value)):
            problems.append(_left_out(path, setting))
    hidden = secret_names(variables_of(filled))
    problems += [
        _no_secret(name, setting)
        for path, setting in layer.items()
        if filled[path] is not setting and (name := path.removeprefix(f"{VARIABLES}.")) not in hidden
    ]
    return filled


def _not_set(name: str, setting: Setting) -> Problem:
    why = f"{PLACEHOLDER} stands for the value in the calling environment"
    return Problem(setting.source.where, f"{name} is not set here", why=why, fix=f"export {name}=...")


def _left_out(path: str, setting: Setting) -> Problem:
    why = "these words stand for the whole value of an environment variable, and for nothing else"
    return Problem(setting.source.where, f"{path} holds {PLACEHOLDER}", why=why, fix="write what belongs there")


def _no_secret(name: str, setting: Setting) -> Problem:
    """Return the problem of a variable that would be written: neither its name nor its value is a secret's."""
    why = "the value that it has here holds no secret of the job, and its name is not one of a secret"
    fix = f"leave {name} out, the ranks have it from the environment; or write its value"
    return Problem(setting.source.where, f"{name} cannot be {PLACEHOLDER}", why=why, fix=fix)
