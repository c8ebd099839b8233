"""What the two PBSes say where they differ, and how they refuse."""

from __future__ import annotations

from dataclasses import dataclass

SERVER = "pbsctl"
QSUB_USAGE = """\
usage: qsub [-a date_time] [-A account_string] [-c interval]
\t[-C directive_prefix] [-e path] [-f ] [-h ] [-I [-X]] [-j oe|eo] [-J X-Y[:Z]]
\t[-k keep] [-l resource_list] [-m mail_options] [-M user_list]
\t[-N jobname] [-o path] [-p priority] [-P project] [-q queue] [-r y|n]
\t[-R o|e|oe] [-S path] [-u user_list] [-W otherattributes=value...]
\t[-v variable_list] [-V ] [-z] [script | -- command [arg1 ...]]
       qsub --version
"""


class RefusedError(Exception):
    """The call is refused.

    Attributes:
        words: what is said on stderr, line by line, without the name of the command.
        code: the exit code.
    """

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.words, self.code = words, code


@dataclass(frozen=True)
class Flavour:
    """One PBS.

    Attributes:
        version: what `--version` says.
        finished: the state of a job that has ended.
        exit_name: the attribute that holds its exit status.
        over_walltime: that status, of a job that was killed for its walltime.
        longest_name: how many characters a name may have.
        unknown_job, unknown_queue, over_limit, not_finished: words and exit code.
    """

    name: str
    version: str
    finished: str
    exit_name: str
    over_walltime: int
    longest_name: int
    unknown_job: str
    unknown_queue: tuple[str, int]
    over_limit: tuple[str, int]
    unknown_resource: str
    not_running: tuple[str, int]

    @property
    def is_torque(self) -> bool:
        """Whether it is Torque."""
        return self.name == "torque"

    def no_job(self, job: str) -> RefusedError:
        """Say that a job is not known."""
        return RefusedError(f"{self.unknown_job} {job}", 153)


OPENPBS = Flavour(
    name="openpbs",
    version="pbs_version = 23.06.06",
    finished="F",
    exit_name="Exit_status",
    over_walltime=-29,
    longest_name=230,
    unknown_job="Unknown Job Id",
    unknown_queue=("Unknown queue", 170),
    over_limit=("Job violates queue and/or server resource limits", 188),
    unknown_resource="Unknown resource {where}{name}",
    not_running=("Request invalid for state of job", 168),
)
TORQUE = Flavour(
    name="torque",
    version="Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e",
    finished="C",
    exit_name="exit_status",
    over_walltime=-11,
    longest_name=15,
    unknown_job="Unknown Job Id Error",
    unknown_queue=("submit error (Unknown queue MSG=cannot locate queue)", 172),
    over_limit=(
        "submit error (Job exceeds queue resource limits MSG=cannot satisfy queue max walltime requirement)",
        188,
    ),
    unknown_resource="submit error (Unknown resource type Resource_List.{name})",
    not_running=("Request invalid for state of job", 170),
)
FLAVOURS = {flavour.name: flavour for flavour in (OPENPBS, TORQUE)}
