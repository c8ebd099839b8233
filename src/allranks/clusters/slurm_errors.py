"""What Slurm's commands say when they fail, and what to do about it."""

from __future__ import annotations

from allranks.clusters.refusals import REFUSED, UNREACHABLE, Refusals

#: Said by scontrol and squeue of a job that the controller never knew, or has forgotten: some minutes after its end.
NO_SUCH_JOB = "Invalid job id specified"

_ASSOCIATIONS = "see yours with sacctmgr show associations user=$USER format=Account,Partition,QOS"

#: What is found in what a command said, what that means, and what to do; the first that is found counts. Where it is
#: one of many things that sbatch may not like, Slurm's own words say why.
_KNOWN = (
    (
        r"Unable to contact slurm controller|backup controller in standby|controller is in standby|"
        r"Socket timed out|Zero Bytes were transmitted",
        UNREACHABLE,
        "see scontrol ping, and try again when it is up",
    ),
    (
        r"Could not establish a configuration source|Unable to process configuration file",
        UNREACHABLE,
        "run this where sbatch works, such as the login node, or set SLURM_CONF to the path of its slurm.conf",
    ),
    (
        r"(?i)munge|authentication (error|credential|agent)",
        UNREACHABLE,
        "ask the site's support: munge must run, with the cluster's key",
    ),
    (r"Incompatible versions", UNREACHABLE, "use the Slurm commands that belong to the cluster"),
    (r"(?i)invalid account", REFUSED, f"change scheduler.account; {_ASSOCIATIONS}"),
    (r"(?i)partition", REFUSED, "set scheduler.partition to one that sinfo --summarize lists and you may use"),
    (r"(?i)invalid qos|QOS usage", REFUSED, f"change scheduler.qos; {_ASSOCIATIONS}"),
    (
        r"accounting/QOS policy",
        REFUSED,
        f"ask for less time or fewer nodes, or wait for your other jobs; {_ASSOCIATIONS}",
    ),
    (
        r"(?i)generic resource|\bgres\b",
        REFUSED,
        "change resources.gpu_type or resources.gpus_per_node; see sinfo --Format=NodeList,Gres",
    ),
    (r"Memory (specification|required)", REFUSED, "lower resources.memory; see sinfo --Format=NodeList,Memory"),
    (r"CPU count|More processors", REFUSED, "lower resources.cpus_per_node; see sinfo --Format=NodeList,CPUs"),
    (
        r"Requested node configuration is not available",
        REFUSED,
        "no node has all that is asked for: lower resources; see sinfo --Format=NodeList,CPUs,Memory,Gres",
    ),
    (r"Invalid node name", REFUSED, "change scheduler.include or scheduler.exclude; see sinfo --Node"),
    (r"(?i)node count", REFUSED, "change resources.nodes"),
    (r"(?i)feature", REFUSED, "change scheduler.constraint; see sinfo --Format=NodeList,Features"),
    (r"(?i)reservation", REFUSED, "change scheduler.reservation; see scontrol show reservation"),
    (r"(?i)job array", REFUSED, "change scheduler.array; see scontrol show config for MaxArraySize"),
    (r"(?i)time limit|--time", REFUSED, "change resources.time"),
    (r"(?i)licen[cs]e", REFUSED, "change --licenses in scheduler.directives; see scontrol show licenses"),
    (r"(?i)Invalid --|unrecognized option|Invalid (numeric )?specification", REFUSED, "change scheduler.directives"),
    (r"Unable to open file|not look like a batch script", REFUSED, "name a script that exists and begins with #!"),
)

SLURM = Refusals(
    scheduler="Slurm",
    submit="sbatch",
    known=_KNOWN,
    said_before=r"((slurm_load_jobs )?(error|fatal): )?((Batch job submission failed|allocation failure): )?",
    ask_again="see scontrol ping, and try again; squeue --me tells whether a job was submitted nevertheless",
    list_jobs="squeue --me",
    cancel="scancel",
    place="the cluster's login node; some sites need module load slurm",
)
