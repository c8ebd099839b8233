"""Has nodes looked at, and reads what they tell."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters.base import Look, Looked
from allranks.plan import environment
from allranks.plan.resolve import environment_of, python_of
from allranks.preflight import program, site
from allranks.preflight.arguments import named_files, named_folders
from allranks.preflight.by_job import look_by_job
from allranks.preflight.model import Node, failed, skipped, warned
from allranks.probe import telling
from allranks.probe.order import Order
from allranks.runs.files import unwritable, write_whole

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.clusters.launch import Launch
    from allranks.job.spec import Environment
    from allranks.plan.plan import Plan
    from allranks.preflight.waiting import Waiting

#: A node gives up on facts after the first, and counts as one that does not answer after the second.
_FACT_SECONDS, _NODE_SECONDS = 10.0, 60.0
#: Where each node connects to each other one too, and waits until all have.
_MESH_SECONDS = 90.0
#: In a folder that nodes look for, and what it is called where there is no run yet.
_SHARED, _PREFIX = "look.word", ".look-"


def look(
    kind: ClusterKind,
    launch: Launch,
    plan: Plan,
    facts: Collection[str],
    folder: Path,
    *,
    word: str,
    is_prepared: bool,
    waiting: Waiting | None = None,
) -> tuple[Node, ...] | str:
    """Have all nodes of a plan looked at; or return why there are none.

    Args:
        kind: the kind of cluster that made the plan.
        launch: what is, or would be, launched.
        plan: the plan.
        facts: names of the facts that are needed.
        folder: a folder here for what the nodes may need.
        word: what stands in the file that all nodes must see; nobody else can know it.
        is_prepared: whether lines of ``environment.node_setup`` are run.
        waiting: how to wait for nodes that somebody has to be asked for; None: nobody is.
    """
    order = order_for(launch, plan, facts, folder, word)
    write_whole(folder / _SHARED, word)
    seconds = _MESH_SECONDS if "mesh" in facts else _NODE_SECONDS
    asked = Look(_script(launch, plan, is_prepared), program.program(order, _sent_along(facts)), folder, seconds)
    try:
        at_once = kind.look(plan, asked, launch.environ)
        looked = _by_job(kind, launch, plan, asked, waiting) if at_once is None else at_once
    finally:
        (folder / _SHARED).unlink(missing_ok=True)
    if isinstance(looked, str):
        return looked
    own = launch.job.environment
    lasting = "container" if own.container else "node_setup" if is_prepared and own.node_setup else ""
    return tuple(_node(number, each, lasting) for number, each in enumerate(looked))


def _by_job(
    kind: ClusterKind, launch: Launch, plan: Plan, asked: Look, waiting: Waiting | None
) -> Sequence[Looked] | str:
    if waiting is None:
        return f"there are no nodes before {plan.cluster} gives some"
    return look_by_job(kind, launch, asked, waiting)


def _sent_along(facts: Collection[str]) -> list[Path]:
    """Find what GPUs are asked with, which nodes need not have: the nvidia-ml-py that is installed here, if it is."""
    spec = importlib.util.find_spec("pynvml") if "gpus" in facts else None
    return [Path(spec.origin)] if spec and spec.origin and spec.origin.endswith("pynvml.py") else []


def order_for(launch: Launch, plan: Plan, facts: Collection[str], folder: Path, word: str) -> Order:
    """Return what the nodes of a plan are asked to look at."""
    entry = next(reason for reason in plan.reasons if reason.subject in ("script", "module", "binary"))
    is_copied = bool(plan.copied_to)  # What the job needs is brought when the run starts: nothing of it is there.
    args, workdir = launch.job.args, Path(plan.workdir)
    # A scheduler's plan has one command for all nodes; of those that are started by hand only this one is looked at.
    nnodes = len(plan.commands) if plan.kind == "local" else max(len(plan.commands), plan.nnodes)
    folders = {"runs": str(Path(plan.run_dir).parent), **named_folders(args, workdir)}
    return Order(
        tuple(facts),
        nnodes=nnodes,
        nproc_per_node=plan.nproc_per_node,
        kind="" if is_copied else entry.subject,
        target=entry.value,
        folders={} if is_copied else folders,
        variables=launch.job.checks.variables,
        executables=site.programs(launch, facts),
        files=() if is_copied else tuple(str(path) for _, path in named_files(args, workdir)),
        shared="" if is_copied or nnodes == 1 else str(folder / _SHARED),
        word=word,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        seconds=_FACT_SECONDS,
    )


@contextmanager
def folder_in(runs_folder: Path) -> Iterator[Path]:
    """Give a folder in the folder of runs, where there is no run; nothing of it stays.

    Raises:
        RunFolderError: the folder of runs cannot be written.
    """
    new = next((path for path in (*reversed(runs_folder.parents), runs_folder) if not path.exists()), None)
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=runs_folder))
    except OSError as error:
        raise unwritable(runs_folder, error) from error
    try:
        yield made
    finally:
        shutil.rmtree(new or made, ignore_errors=True)


def _script(launch: Launch, plan: Plan, is_prepared: bool) -> str:
    job = launch.job
    chosen: Environment = environment_of(job, launch.folder)
    chosen = chosen.model_copy(update={"setup": ()} if is_prepared else {"setup": (), "node_setup": ()})
    return program.script(
        workdir="." if plan.copied_to else plan.workdir,
        environment=chosen,
        settings=environment.settings(job, None, {}),
        python=python_of(job, launch.environ, elsewhere=bool(plan.copied_to)),
    )


def _node(number: int, looked: Looked, lasting: str) -> Node:
    """Read what a node tells, or say why it tells nothing.

    Args:
        number: which node it is.
        looked: what became of the look.
        lasting: what of the job's environment may take longer than a look; empty: nothing.
    """
    host, answer = looked.host, looked.answer
    found = telling.read(answer.out).get(number)
    if found:
        return Node(number, host, found["facts"], found["errors"])
    if answer.is_late:
        what = f"it does not answer: {answer.last_words}"
        if lasting:
            fix = f"does environment.{lasting} take longer? If not: ssh {host} uptime"
            return Node(number, host, failure=warned(what, fix=fix, host=host))
        fix = f"is {host} hanging? ssh {host} uptime"
        return Node(number, host, failure=failed(what, fix=fix, host=host, exclude=host))
    if answer.unreached:
        fix = looked.fix or f"see what {host} says of it"
        what = f"it cannot be reached: {answer.last_words}"
        return Node(number, host, failure=failed(what, fix=fix, host=host, exclude=host))
    if answer.code == program.TOO_OLD:
        what = f"{answer.last_words} of the job's environment is too old to look with: 3.10 is needed"
        return Node(number, host, failure=skipped(what, host=host))
    if lasting == "container":  # It may pass no stdin on, and run the job all the same.
        what, fix = f"the container could not be looked into: {answer.last_words}", "see environment.container"
        return Node(number, host, failure=warned(what, fix=fix, host=host))
    fix = looked.fix or "correct environment in the job file, or install there what it names"
    return Node(number, host, failure=failed(answer.last_words, fix=fix, host=host))
