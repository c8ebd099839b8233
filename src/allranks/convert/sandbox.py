"""A sandbox in which a launch script runs without harm: its commands are recorders, and nothing that it writes is kept.

``run`` starts this file by ``unshare`` (util-linux) in namespaces of its own: users, mounts, processes, network, IPC
and host name. Each file system is the lower layer of an overlay whose upper layer is in memory, or read-only where that
cannot be; no file of it can be executed. ``/usr/bin`` and its like hold copies of harmless commands; each other command
there is the ``recorder``. Processes have no capability, no device but ``/dev/null`` and its like, and limits of memory,
time, number and size of files. What the process that starts all this ends with is a JSON object on stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What a script may really run: it reads and writes files of the sandbox, and prints.
_REAL = """
    arch awk base64 basename bash cat chmod cmp comm cp cut date diff dirname echo egrep env expand expr false
    fgrep find fold getopt grep head id join ln ls mkdir mktemp mv nice nl nohup od paste printenv printf pwd
    readlink realpath rev rm rmdir sed seq setsid sh shuf sort split stat tac tail tee test timeout touch tr
    true tsort uname uniq wc whoami xargs yes [
"""
#: Where commands and libraries are.
_BINS = ("/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin")
_LIBS = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
#: What is not shown: other processes, devices, and sockets of services.
_HIDDEN = ("/proc", "/sys", "/dev", "/run")
#: More entries of a directory than these are not shown one by one.
_ENTRIES = 100
_DEVICES = ("null", "zero", "full", "random", "urandom")
#: In the sandbox: commands, the recorder's Python and its configuration; what is recorded; stderr of the script.
TOOLS, RECORDS = "/.allranks", "/.allranks-records"
#: Most seconds of a script, and of CPU of each of its processes: a busy machine takes longer for the same work.
_SECONDS, _CPU_SECONDS = 30, 10
#: Most processes of a script at a time, bytes of a file, of all that is written, and of memory.
_PROCESSES, _FILE, _ALL, _MEMORY = 300, 32 << 20, 128 << 20, 1 << 30
#: With more processes than _PROCESSES the sandbox ends; more than these cannot start.
_MOST_PROCESSES = 1000
#: Flags of mount(2), as in <linux/mount.h>.
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _MOVE = 1, 2, 4, 8, 32, 4096, 8192
_PRIVATE, _REC = 1 << 18, 16384
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _HIGHEST_CAPABILITY = 24, 38, 63
_SUFFIXES = (".sh", ".bash", ".env")
_SHELLS = (b"bash", b"sh", b"/usr/bin/env bash", b"/usr/bin/env sh")


class SandboxError(Exception):
    """There can be no sandbox here; its text says why."""


def run(
    command: Sequence[str],
    *,
    cwd: str,
    environ: Mapping[str, str],
    files: Mapping[str, str],
    stubs: Sequence[str],
    commands: Sequence[str],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Run a command in a new sandbox.

    Args:
        command: its words; a name is found in the sandbox's directories of commands.
        cwd: absolute directory to start in.
        environ: all variables that it starts with.
        files: text by absolute path, of files that are there in the sandbox alone.
        stubs: absolute paths of further commands that are recorders, of files to be sourced that are empty, and, with
            a slash at the end, of empty directories.
        commands: names of all recorders.
        facts: what recorders answer from.

    Returns:
        ``records`` (list of objects), ``stdout`` and ``stderr`` (text, cut if it is long) and ``late`` (whether it was
        ended by its limits).

    Raises:
        SandboxError: there can be none here.
    """
    wanted = {
        **{"command": [*command], "cwd": cwd, "environ": {**environ}, "files": {**files}, "stubs": [*stubs]},
        **{"commands": [*commands], "facts": {**facts}},
    }
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
    python = [sys.executable, "-I", "-S", __file__]
    with tempfile.TemporaryDirectory(prefix="allranks-verify-") as place:
        try:
            done = subprocess.run(
                [*unshare, "--kill-child", *python, place],
                input=json.dumps(wanted),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS * 2,
                check=False,
            )
        except FileNotFoundError as error:
            raise SandboxError("there is no command unshare (util-linux)") from error
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"it has not ended after {_SECONDS * 2} s") from error
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise SandboxError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}") from error
    return found


def _mount(source: str, target: Path, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    if _LIBC.mount(*words, ctypes.c_ulong(flags), None if data is None else os.fsencode(data)):
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", str(target))


def _bind(source: str | Path, target: Path, flags: int) -> None:
    """Show a file or directory at another place too, read-only; an outer namespace's restrictions stay."""
    _mount(str(source), target, None, _BIND)
    kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME)
    relatime = 1 << 21 if kept & os.ST_RELATIME else 0
    _mount("none", target, None, _REMOUNT | _BIND | flags | _RDONLY | (kept & ~os.ST_RELATIME) | relatime)


def _points() -> set[str]:
    """Return all mount points of this namespace."""
    points = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return {
        each.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape") for each in points
    }


def _layer(place: Path, directory: Path, points: set[str], needed: Sequence[str]) -> None:
    """Show a directory in the new root; what is written to it stays in memory.

    An overlay cannot show what is mounted below its directory: then each entry gets one of its own; of very many, those
    on the way to what is ``needed``.
    """
    target = Path(f"{place}/root{directory}")
    if str(directory) in (*_HIDDEN, str(place)):
        return
    below = "/" if directory == Path("/") else f"{directory}/"
    if not any(each.startswith(below) and each != "/" for each in points):
        _overlay(place, directory, target)
        return
    entries = sorted(directory.iterdir())
    if len(entries) > _ENTRIES:
        entries = [each for each in entries if any(f"{path}/".startswith(f"{each}/") for path in (*needed, *points))]
    for entry in entries:
        with suppress(OSError):  # One that cannot be read is not there.
            if entry.is_symlink():
                Path(f"{target}/{entry.name}").symlink_to(entry.readlink())
            elif entry.is_dir():
                Path(f"{target}/{entry.name}").mkdir(entry.stat().st_mode & 0o7777)
                _layer(place, entry, points, needed)
            elif entry.is_file():
                Path(f"{target}/{entry.name}").touch()
                _bind(entry, Path(f"{target}/{entry.name}"), _NOSUID | _NODEV | _NOEXEC)


def _overlay(place: Path, directory: Path, target: Path) -> None:
    upper, work = Path(f"{place}/upper{directory}"), Path(f"{place}/work{directory}")
    upper.mkdir(parents=True)
    work.mkdir(parents=True)
    upper.chmod(directory.stat().st_mode & 0o7777)
    escaped = (re.sub(r"([\\\\,:])", r"\\\1", str(each)) for each in (directory, upper, work))
    layers = "lowerdir={},upperdir={},workdir={}".format(*escaped)
    for options in (f"{layers},userxattr", layers):
        with suppress(OSError):
            _mount("overlay", target, "overlay", _NOSUID | _NODEV | _NOEXEC, options)
            return
    _bind(directory, target, _NOSUID | _NODEV | _NOEXEC)


def _devices(root: Path) -> None:
    _mount("tmpfs", root / "run", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=4m")
    _mount("tmpfs", root / "dev", "tmpfs", _NOSUID | _NOEXEC, "size=4m")
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, _BIND)
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        (root / "dev" / name).symlink_to(f"/proc/self/fd{target}")
    (root / "dev/shm").mkdir(mode=0o777)
    with suppress(PermissionError):  # In some containers; then there is none.
        _mount("proc", root / "proc", "proc", _NOSUID | _NODEV | _NOEXEC | _RDONLY)


def _commands(root: Path, wanted: Mapping[str, Any]) -> None:
    """Replace all commands."""
    base = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    libraries = [*_LIBS, f"{sys.base_prefix}/lib", f"{base.parent.parent}/lib"]
    for path in dict.fromkeys(Path(each).resolve() for each in libraries):
        if path.is_dir():
            _bind(path, Path(f"{root}{path}"), _NOSUID | _NODEV)
    tools = Path(f"{root}{TOOLS}")
    tools.mkdir(0o755)
    _mount("tmpfs", tools, "tmpfs", _NOSUID | _NODEV, "size=64m,mode=755")
    (tools / "python/bin").mkdir(parents=True)
    (tools / "python/pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (tools / "python/bin/python3").touch()
    _bind(base, tools / "python/bin/python3", _NOSUID | _NODEV)
    _recorder(tools)
    (tools / "facts.json").write_text(json.dumps(wanted["facts"]))
    (tools / "bin").mkdir()
    (tools / "bin/activate").write_text("export CONDA_DEFAULT_ENV=$1\n")  # ``source activate NAME`` of older conda.
    for name in _REAL.split():
        if found := shutil.which(name, path=":".join(_BINS)):
            shutil.copy(found, tools / "bin" / name)
    for name in wanted["commands"]:
        if not (tools / "bin" / name).exists():
            (tools / "bin" / name).symlink_to(f"{TOOLS}/recorder")
    (tools / "first").mkdir()
    for name in ("activate", "python", "python3"):
        (tools / "first" / name).symlink_to(f"{TOOLS}/bin/{name}")
    _mount("none", tools, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    for path in dict.fromkeys(Path(each).resolve() for each in _BINS):
        if path.is_dir():
            _bind(tools / "bin", Path(f"{root}{path}"), _NOSUID | _NODEV)


def _recorder(tools: Path) -> None:
    """Put the recorder there, compiled if that is in ``__pycache__``: a script may start it hundreds of times."""
    source, code = Path(__file__).parent, tools / "code/allranks"
    shutil.copytree(source / "recorder", code / "convert/recorder")
    shutil.copytree(
        source.parent / "system",
        code / "system",
        ignore=lambda _, names: [each for each in names if not each.startswith(("hostlist.", "__"))],
    )
    imports = f"import sys\nsys.path.insert(0, '{TOOLS}/code')\nfrom allranks.convert.recorder.main import main\n"
    (tools / "recorder").write_text(f"#!{TOOLS}/python/bin/python3 -IS\n{imports}sys.exit(main())\n")
    (tools / "recorder").chmod(0o755)


def _files(wanted: Mapping[str, Any]) -> None:
    """Put files and stubs where they are expected: inside of the new root, so that no link leads out of it."""
    Path(RECORDS).mkdir()
    Path(f"{RECORDS}/all").touch()
    for name, text in wanted["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for name in wanted["stubs"]:
        with suppress(OSError):  # It may be in a file system that cannot be written: then it stays missing.
            if name.endswith("/"):
                Path(name).mkdir(parents=True, exist_ok=True)
            else:
                _stub(Path(name))


def _stub(path: Path) -> None:
    """Make a file one that can be sourced, or executed: as it is if it is for a shell, else a recorder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = Path(TOOLS, "recorder")
    if path.name == "activate":
        if not path.exists():
            is_conda, venv = "conda" in str(path), shlex.quote(str(path.parent.parent))
            sets = f"VIRTUAL_ENV={venv}\nexport PATH=$VIRTUAL_ENV/bin:$PATH"
            path.write_text(f"export {'CONDA_DEFAULT_ENV=${1:-base}' if is_conda else sets}\n")
        return
    if path.exists() and (_is_shell_script(path) or path.suffix in _SUFFIXES):
        source = path
    elif path.suffix in _SUFFIXES or path.name in _SUFFIXES:
        path.touch()
        return
    else:
        path.unlink(missing_ok=True)
        path.touch()
    _mount(str(source), path, None, _BIND)
    _mount("none", path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _is_shell_script(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and first[2:].strip().split(b" -")[0].endswith(_SHELLS)


def _drop_rights() -> None:
    """Drop all capabilities with the next program that is executed, for good."""
    for number in range(_HIGHEST_CAPABILITY + 1):
        _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)  # Those that this kernel has.
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")


def _limit() -> None:
    """Limit what the script's processes can use; in the process that becomes the first of them."""
    limits = {
        resource.RLIMIT_CPU: _CPU_SECONDS,
        resource.RLIMIT_FSIZE: _FILE,
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_CORE: 0,
    }
    if _kernel() >= (5, 14):  # Before, this counts all processes of the user. It does not bind root.
        limits[resource.RLIMIT_NPROC] = _MOST_PROCESSES
    for number, most in limits.items():
        resource.setrlimit(number, (most, most))
    os.nice(5)
    os.setsid()


def _limit_processes() -> None:
    """Limit how many processes there can be: on a busy machine, too many start before they are counted."""
    if _kernel() >= (6, 14):  # Before, this is a number of the whole machine.
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(_MOST_PROCESSES))


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _wait() -> bool:
    """Wait for all processes of the sandbox, of which this is the first; return whether they were too many or late."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and sum(path.name.isdecimal() for path in Path("/proc").iterdir()) < _PROCESSES:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        time.sleep(0.01)
    return True


def main(place: Path) -> None:
    """Build the sandbox in ``place``, run what stdin describes, and print what was recorded."""
    wanted = json.load(sys.stdin)
    _limit_processes()
    _mount("none", Path("/"), None, _PRIVATE | _REC)
    points = _points()
    _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, f"size={_ALL},nr_inodes=50000,mode=755")
    root = place / "root"
    root.mkdir()
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV | _NOEXEC, f"size={_ALL},mode=755")
    needed = [wanted["cwd"], wanted["environ"]["HOME"], sys.base_prefix]
    _layer(place, Path("/"), points, needed)
    _devices(root)
    _commands(root, wanted)
    os.chdir(root)
    _mount(".", Path("/"), None, _MOVE)
    os.chroot(".")
    os.chdir("/")
    _files(wanted)
    _drop_rights()
    with open(f"{RECORDS}/stdout", "w+b") as stdout, open(f"{RECORDS}/stderr", "w+b") as stderr:
        command, environ, cwd = wanted["command"], wanted["environ"], wanted["cwd"]
        nothing = subprocess.DEVNULL
        subprocess.Popen(
            command, cwd=cwd, env=environ, stdin=nothing, stdout=stdout, stderr=stderr, preexec_fn=_limit
        ).returncode = 0  # It is waited for with the others.
        late = _wait()
        printed, said = (os.pread(file.fileno(), 200_000, 0).decode("utf-8", "replace") for file in (stdout, stderr))
    with open(f"{RECORDS}/all", encoding="utf-8", errors="replace") as file:
        text = file.read(20_000_000)
    records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    print(json.dumps({"records": records, "stdout": printed, "stderr": said, "late": late}))


if __name__ == "__main__":
    _LIBC = ctypes.CDLL(None, use_errno=True)
    main(Path(sys.argv[1]).resolve())
