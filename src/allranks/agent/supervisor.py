"""The supervisor of a batch job: the batch script executes it on the first node.

``python <run>/code --supervise start`` claims the next attempt, determines hosts, end time and rendezvous, starts
node.sh on all nodes by the scheduler's own commands, records the exit code and decides about another attempt. If the
set-up in the script failed, its exit code replaces ``start``, and the supervisor starts no ranks.

``--supervise-alone SCRIPT start`` serves a standalone script, whose run has no other files: stdin holds node.sh and, in
the last line, the specs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.agent import requeue
from allranks.agent.batch_job import BatchJob, this_job
from allranks.agent.heartbeat import complain
from allranks.errors import AllranksError, RunFolderError
from allranks.record.files import copy_node_code
from allranks.record.notify import Notifier
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system import schedulers

#: Step from a port in use to the next candidate: neighbouring ports belong to jobs submitted at the same time.
_PORT_STEP = 997
_CONNECT_SECONDS = 2.0
#: Signals that end a job.
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Exit codes of ranks that were stopped on request without saving.
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)


def main(argv: Sequence[str]) -> NoReturn:
    """Run the job, and exit with its exit code. ``argv`` holds ``start``, or the exit code of a failed set-up."""
    for number in _ENDINGS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # Ignore the warning until ranks run. Not by SIG_IGN, which child processes would inherit.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    run = Path(os.environ[contract.RUN_DIR])
    spec = BatchSpec.from_json((run / contract.BATCH_SPEC).read_text(encoding="utf-8"))
    node = NodeSpec.from_json((run / contract.NODE_SPEC).read_text(encoding="utf-8"))
    users_umask = os.umask(0o777 & ~node.folder_mode)
    try:
        job = this_job(spec, node)
        run = _task_folder(run, job.array_task, spec.script) if spec.is_array and job.array_task else run
        attempt = _take_attempt(run, job.id)
    except (AllranksError, OSError) as error:
        complain(f"allranks: {_in_a_line(error)}")
        sys.exit(1)
    os.environ.update({contract.RUN_DIR: str(run), contract.ATTEMPT: str(attempt)})
    os.umask(users_umask)
    notifier = Notifier(run, attempt, job=job.id)
    code = _run_ranks(run, attempt, spec, job, notifier) if argv[0] == "start" else int(argv[0])
    for number in _ENDINGS:
        # Child processes ignore them too: Slurm signals all processes of a job that it requeues, even scontrol.
        signal.signal(number, signal.SIG_IGN)
    _finish(run, attempt, code, spec, job, notifier)
    sys.exit(code)


def main_alone(argv: Sequence[str]) -> NoReturn:
    """Write the run's files from stdin and the script ``argv[0]``; then continue as :func:`main` with the rest."""
    script, *rest = argv
    *node_script, specs = sys.stdin.read().splitlines(keepends=True)
    parts = json.loads(specs)
    node = NodeSpec.from_json(json.dumps(parts["node"]))
    users_umask = os.umask(0o777 & ~node.folder_mode)
    run = Path(os.environ[contract.RUN_DIR])
    run.mkdir(parents=True, exist_ok=True)
    files = {
        contract.NODE_SCRIPT: "".join(node_script),
        contract.NODE_SPEC: node.to_json(),
        contract.BATCH_SPEC: json.dumps(parts["supervisor"], indent=2) + "\n",
        parts["supervisor"]["script"]: Path(script).read_text(encoding="utf-8", errors="surrogateescape"),
    }
    new = run / f"new-{socket.gethostname()}-{os.getpid()}"  # Renamed: other array tasks may be reading.
    if "notify" in parts:
        files[contract.NOTIFY_FILE] = json.dumps(parts["notify"])
    for name, text in files.items():
        new.write_text(text, encoding="utf-8", errors="surrogateescape")
        new.replace(run / name)
    if not (run / contract.CODE).exists():
        other = schedulers.file_to_copy(parts["supervisor"]["module"])
        copy_node_code(new, [other] if other else [], (*contract.NODE_CODE, *contract.DIAGNOSIS_CODE))
        new.replace(run / contract.CODE)  # Other array tasks write the same.
    os.umask(0o077)
    with suppress(FileExistsError), (run / contract.KEY_FILE).open("x") as file:
        file.write(secrets.token_hex(32) + "\n")  # The first one counts.
    os.umask(users_umask)
    main(rest)


def _task_folder(run: Path, task: str, script: str) -> Path:
    """Create the directory of an array task, laid out like that of a run; return it."""
    folder = run / f"{contract.TASK}{task}"
    folder.mkdir(exist_ok=True)
    shared = (contract.CODE, contract.KEY_FILE, contract.NODE_SPEC, contract.BATCH_SPEC, contract.NODE_SCRIPT)
    optional = [contract.NOTIFY_FILE] if (run / contract.NOTIFY_FILE).exists() else []
    for name in (*shared, *optional, script):
        with suppress(FileExistsError):
            (folder / name).symlink_to(Path("..", name))
    return folder


def _take_attempt(run: Path, job: str) -> int:
    """Claim the first attempt whose directory has no job id yet; return its number."""
    attempt = 0
    while True:
        folder = run / contract.attempt_dir(attempt)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / contract.JOB).open("x") as file:
                file.write(f"{job}\n")
            return attempt
        except FileExistsError:
            attempt += 1
        except OSError as error:
            raise RunFolderError(f"cannot write into {folder}: {error.strerror}") from error


def _run_ranks(run: Path, attempt: int, spec: BatchSpec, job: BatchJob, notifier: Notifier) -> int:
    """Run the ranks on all nodes; return the exit code, or 1 after an error, which is recorded."""
    most, node, folder = spec.max_attempts, job.node, run / contract.attempt_dir(attempt)
    try:
        if attempt and most is not None and not requeue.may_start(run, attempt, most, job):
            return 1
        notifier.send("start", state="RUNNING")
        hosts = job.hosts()
        (folder / contract.HOSTS).write_text("".join(f"{host}\n" for host in hosts))
        master = spec.master_addr or hosts[0]
        os.environ.update(
            {
                contract.RDZV_HOST: master,
                contract.RDZV_PORT: str(node.master_port or _free_port(master, job.number)),
                contract.NODE_COUNT: str(job.node_count(hosts)),
                contract.NODE_NPROC: str(node.nproc_per_node),
                contract.END_TIME: str(job.end_time() or ""),
            }
        )
        return job.run(folder, hosts)
    except SystemExit as end:
        return int(end.code or 0)
    except (AllranksError, OSError) as error:
        complain(f"allranks: {_in_a_line(error)}")
    except Exception:  # noqa: BLE001 - a mistake of ours, or of another package's scheduler
        complain()
    return 1


def _free_port(host: str, number: int) -> int:
    """Return a port that is free on the first node, derived from the job's ``number``."""
    while True:
        port = contract.FIRST_PORT + number % contract.PORTS
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError:
            return port
        number += _PORT_STEP


def _in_a_line(error: AllranksError | OSError) -> str:
    if isinstance(error, AllranksError):
        return error.in_a_line
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _finish(run: Path, attempt: int, code: int, spec: BatchSpec, job: BatchJob, notifier: Notifier) -> None:
    """Record the exit code, decide about another attempt, remove secrets no longer needed, and notify."""
    folder = run / contract.attempt_dir(attempt)
    continues = False
    try:
        (folder / contract.EXIT).write_text(f"{code}\n")
        if spec.max_attempts is not None:
            continues = requeue.follows(run, attempt, code, spec.max_attempts, job, notifier)
        if spec.removes_secrets and not (continues or (folder / contract.TERMINATED).exists()):
            (run / contract.SECRETS_FILE).unlink(missing_ok=True)
        if not continues:
            state = _state(folder, code, job)
            facts = {"reason": "it reached its time limit"} if state == "TIMEOUT" else {}
            event = "failure" if state in ("FAILED", "TIMEOUT") else "end"
            notifier.send(event, state=state, exit_code=code, **facts)
            notifier.report()
    except Exception:  # noqa: BLE001 - the job keeps its exit code
        complain()


def _state(folder: Path, code: int, job: BatchJob) -> str:
    """Return the run's state after its last attempt, as far as the supervisor can know it."""
    if code in _STOPPED or (code and (folder / contract.TERMINATED).exists()):
        return "TIMEOUT" if job.is_over() else "CANCELLED"
    return {0: "SUCCEEDED", contract.CONTINUE_LATER: "PREEMPTED"}.get(code, "FAILED")
