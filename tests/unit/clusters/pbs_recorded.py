"""The recorded answers of a real OpenPBS (tests/cluster/answers), and written ones of other PBS.

What is here of Torque, of PBS Pro and of Grid Engine is written down from their public documentation, not recorded.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path

from allranks.clusters.batch.scheduler import JobInfo
from allranks.clusters.pbs_words import parse_jobs

ANSWERS = Path(__file__).parents[2] / "cluster" / "answers" / "openpbs-23.06"


def text_of(file: str) -> str:
    return (ANSWERS / file).read_text()


def as_plain(answer: str) -> str:
    """Return what was recorded in JSON as the plain format has it."""
    text = ""
    for job_id, fields in json.loads(answer)["Jobs"].items():
        text += f"Job Id: {job_id}\n"
        for name, value in fields.items():
            if name == "Variable_List":
                text += f"    {name} = {','.join(f'{key}={of}' for key, of in value.items())}\n"
            elif isinstance(value, dict):
                text += "".join(f"    {name}.{key} = {of}\n" for key, of in value.items())
            else:
                text += f"    {name} = {value}\n"
        text += "\n"
    return text


def recorded(name: str) -> JobInfo:
    """Return what is read of a recorded answer."""
    text = text_of(f"{name}.txt") if (ANSWERS / f"{name}.txt").exists() else as_plain(text_of(f"{name}.json"))
    (job,) = parse_jobs(text)
    return job


def failures(file: str) -> list[tuple[list[str], int, str]]:
    """Return recorded commands: command, exit code, what was said."""
    blocks = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*?)\[exit (\d+)\]", text_of(file), re.MULTILINE)
    return [(command.split(), int(code), said) for command, said, code in blocks]


def at(clock: str, day: int = 22) -> float:
    """Return the time on the day of the recording, or on another of that month."""
    return datetime.fromisoformat(f"2026-11-{day:02d}T{clock}").replace(tzinfo=timezone.utc).timestamp()


TORQUE_RUNNING = """\
Job Id: 4711.pbs.example.org
    Job_Name = mnist
    Job_Owner = ada@login1.example.org
    resources_used.cput = 00:00:12
    resources_used.energy_used = 0
    resources_used.mem = 10744kb
    resources_used.vmem = 512000kb
    resources_used.walltime = 00:01:40
    job_state = R
    queue = batch
    server = pbs.example.org
    Checkpoint = u
    ctime = Sun Nov 22 10:00:00 2026
    Error_Path = login1.example.org:/home/ada/mnist.e4711
    exec_host = gpu01/0-1+gpu02/0+gpu02/1
    Hold_Types = n
    Join_Path = oe
    Keep_Files = n
    Mail_Points = a
    mtime = Sun Nov 22 10:00:05 2026
    Output_Path = login1.example.org:/home/ada/mnist.o4711
    Priority = 0
    qtime = Sun Nov 22 10:00:00 2026
    Rerunable = True
    Resource_List.nodect = 2
    Resource_List.nodes = 2:ppn=2:gpus=1
    Resource_List.walltime = 01:00:00
    session_id = 12345
    Variable_List = PBS_O_QUEUE=batch,PBS_O_HOME=/home/ada,
\tPBS_O_LOGNAME=ada,PBS_O_PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:
\t/usr/sbin,PBS_O_WORKDIR=/home/ada,PBS_O_HOST=login1.example.org
    euser = ada
    egroup = lab
    queue_type = E
    etime = Sun Nov 22 10:00:00 2026
    submit_args = mnist.sh
    start_time = Sun Nov 22 10:00:05 2026
    Walltime.Remaining = 3500
    start_count = 1
    fault_tolerant = False
    job_radix = 0
    submit_host = login1.example.org

"""


def torque_ended(exit_status: int, used: str = "00:01:40", *, ran: bool = True) -> str:
    """Return what Torque tells of a job that it keeps for some minutes after its end."""
    text = TORQUE_RUNNING.replace("job_state = R", "job_state = C").replace("00:01:40", used)
    text = text.replace(
        "    submit_args", f"    exit_status = {exit_status}\n    comp_time = Sun Nov 22 10:02:00 2026\n    submit_args"
    )
    return text if ran else re.sub(r"^    (exec_host|start_\w+|resources_used\.\w+) = .*\n", "", text, flags=re.M)


#: A job of PBS Pro 2021 at its time limit: no obittime, and the host and its virtual nodes have other names.
PBS_PRO = """\
{
    "timestamp":1795342000,
    "pbs_version":"2021.1.2.20220520170350",
    "pbs_server":"pbs01",
    "Jobs":{
        "812345.pbs01":{
            "Job_Name":"mnist",
            "Job_Owner":"ada@login1",
            "resources_used":{
                "cpupercent":98,
                "cput":"01:00:03",
                "mem":"1048576kb",
                "ncpus":64,
                "vmem":"2097152kb",
                "walltime":"01:00:11"
            },
            "job_state":"F",
            "queue":"gpuq",
            "server":"pbs01",
            "Checkpoint":"u",
            "ctime":"Sun Nov 22 10:00:00 2026",
            "exec_host":"gpu01/0*32+gpu02/0*32",
            "exec_vnode":"(gpu01[0]:ncpus=32:ngpus=4)+(gpu02[0]:ncpus=16:ngpus=2+gpu02[1]:ncpus=16:ngpus=2)",
            "Hold_Types":"n",
            "mtime":"Sun Nov 22 11:05:00 2026",
            "Resource_List":{
                "ncpus":64,
                "ngpus":8,
                "nodect":2,
                "walltime":"01:00:00"
            },
            "stime":"Sun Nov 22 10:00:05 2026",
            "substate":93,
            "Variable_List":{
                "PBS_O_HOME":"/home/ada",
                "PBS_O_WORKDIR":"/home/ada"
            },
            "comment":"Job run at Sun Nov 22 at 10:00 on (gpu01[0]:ncpus=32:ngpus=4) and failed",
            "run_count":1,
            "Exit_status":271,
            "history_timestamp":1795345217,
            "project":"_pbs_project_default"
        }
    }
}
"""

#: What qstat --version says, where that is not OpenPBS.
VERSIONS = {
    "pbs_version = 2021.1.2.20220520170350\n": "openpbs",
    "pbs_version = PBSPro_13.1.2.160703\n": "openpbs",
    "Version: 6.1.3\nCommit: 0b3ca9e9c4e4b2a5\n": "torque",
    "version: 2.5.13\n": "torque",
}
GRID_ENGINE = 'error: ERROR! invalid option argument "--version"\nUsage: qstat [options]\n'
