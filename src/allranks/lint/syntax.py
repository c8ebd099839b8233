"""How the commands that start ranks take their options. Plain data: a new option of one of them is added here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from allranks.lint.model import Command, Word


@dataclass(frozen=True)
class Syntax:
    """The options of a program."""

    valued: frozenset[str]  # Options that take a value, in the next word or after ``=``.
    flags: frozenset[str]  # Options that take none, or only after ``=``.
    same: dict[str, str] = field(default_factory=dict)  # Other names of options, and the one that is used here.
    attaches: bool = False  # Whether a short option's value may stand in the same word: ``-N2``.
    abbreviates: bool = False  # Whether the beginning of a long option is enough where it is unique.

    def canonical(self, name: str) -> str:
        """Return the name of an option that is used here."""
        if name.startswith("--"):
            name = "--" + name[2:].replace("_", "-")
        name = self.same.get(name, name)
        if f"-{name}" in self.valued and name not in self.valued and not self.attaches:
            return f"-{name}"  # mpirun -output-filename
        if name in self.valued or name in self.flags or not (self.abbreviates and name.startswith("--")):
            return name
        near = {
            self.same.get(known, known) for known in (*self.valued, *self.flags, *self.same) if known.startswith(name)
        }
        return near.pop() if len(near) == 1 else name

    def knows(self, name: str) -> bool:
        """Return whether there is such an option."""
        return self.canonical(name) in self.valued | self.flags


@dataclass(frozen=True)
class Given:
    """An option that a command was given, with its value: a word without parts if it has none."""

    name: str
    typed: str
    value: Word
    at: int


@dataclass(frozen=True)
class Call:
    """A command whose options have been read."""

    given: tuple[Given, ...]  # Its options in their order.
    rest: tuple[Word, ...]  # The words from the first one on that is no option.
    syntax: Syntax

    def get(self, *names: str) -> Given | None:
        """Return the last of these options; None if none was given."""
        return next((given for given in reversed(self.given) if given.name in names), None)

    def value(self, *names: str) -> str | None:
        """Return the value of an option, or None if it is not given or not known."""
        given = self.get(*names)
        return given.value.value if given else None

    def number(self, *names: str) -> int | None:
        """Return the value of an option as a whole number, or None."""
        given = self.get(*names)
        return given.value.number if given else None


def _syntax(valued: str, flags: str, same: str = "", *, attaches: bool = False, abbreviates: bool = False) -> Syntax:
    pairs = dict(pair.split("=") for pair in same.split())
    return Syntax(frozenset(valued.split()), frozenset(flags.split()), pairs, attaches, abbreviates)


#: sbatch(1) and srun(1) of Slurm 22.05 to 25.05.
_SLURM_VALUED = """
    --account --acctg-freq --array --batch --bb --bbf --begin --chdir --cluster-constraint --clusters --comment
    --constraint --container --container-id --core-spec --cores-per-socket --cpu-freq --cpus-per-gpu --cpus-per-task
    --deadline --delay-boot --dependency --distribution --error --exclude --export --export-file --extra
    --extra-node-info --gid --gpu-bind --gpu-freq --gpus --gpus-per-node --gpus-per-socket --gpus-per-task --gres
    --gres-flags --hint --input --job-name --licenses --mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu
    --mem-per-gpu --network --nodefile --nodelist --nodes --ntasks --ntasks-per-core --ntasks-per-gpu --ntasks-per-node
    --ntasks-per-socket --open-mode --output --partition --power --prefer --priority --profile --qos --reservation
    --resv-ports --segment --signal --sockets-per-node --stepmgr --switches --thread-spec --threads-per-core --time
    --time-min --tmp --tres-per-job --tres-per-task --uid --wait-all-nodes --wckey --wrap --cpu-bind --bcast
    --compress --epilog --prolog --het-group --jobid --kill-on-bad-exit --max-exit-timeout --max-threads --mpi
    --msg-timeout --mincpus
    --multi-prog --pmi-launch --relative --slurmd-debug --task-epilog --task-prolog --wait --treewidth --oom-kill-step
    --container-image --container-mounts --container-workdir --container-name --container-save --container-env
    --container-mount-home --licences --accel-bind --send-libs --x11 --ntasks-per-tres --workdir --nice --propagate
    --container-writable --container-readonly --container-remap-root --no-container-mount-home
"""
_SLURM_FLAGS = """
    --contiguous --exclusive --get-user-env --help --hold --ignore-pbs --immediate --kill-on-invalid-dep
    --no-kill --no-requeue --oversubscribe --overcommit --parsable --quiet --reboot --requeue --spread-job --test-only
    --use-min-nodes --verbose --usage --version --interactive --label --no-allocate --overlap --preserve-env
    --pty --unbuffered --disable-status --debugger-test --whole --exact --share --external-launcher --pack-group --async
"""
_SLURM_SAME = """
    -A=--account -a=--array -b=--begin -B=--extra-node-info -c=--cpus-per-task -C=--constraint -d=--dependency
    -D=--chdir -e=--error -F=--nodefile -G=--gpus -i=--input -J=--job-name -k=--no-kill -L=--licenses -m=--distribution
    -M=--clusters -N=--nodes -n=--ntasks -o=--output -O=--overcommit -p=--partition -q=--qos -S=--core-spec
    -s=--oversubscribe -t=--time -w=--nodelist -W=--wait -x=--exclude -H=--hold -Q=--quiet -v=--verbose -h=--help
    -K=--kill-on-bad-exit -l=--label -u=--unbuffered -E=--preserve-env -r=--relative -I=--immediate -X=--disable-status
    -T=--threads -Z=--no-allocate --tasks-per-node=--ntasks-per-node --licence=--licenses --cpu_bind=--cpu-bind
    --mem_bind=--mem-bind --tasks=--ntasks -V=--version
"""
#: Flags of one letter, and long options whose value is optional and follows ``=``.
_OPTIONAL = """--kill-on-bad-exit --nice --propagate --resv-ports --x11 --bcast --wait --immediate --multi-prog
    --container-mount-home --no-container-mount-home --container-writable --container-readonly --container-remap-root
    --stepmgr --send-libs"""
_SBATCH = _syntax(
    " ".join(set(_SLURM_VALUED.split()) - set(_OPTIONAL.split())),
    f"{_SLURM_FLAGS} {_OPTIONAL}",
    _SLURM_SAME,
    attaches=True,
    abbreviates=True,
)
#: torch/distributed/run.py and launch.py of torch 1.9 to 2.13.
_TORCHRUN = _syntax(
    """--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval
    --start-method --event-log-handler --role --log-dir --redirects --tee --local-ranks-filter
    --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr
    --logs-specs --numa-binding
    --signals-to-handle --shutdown-timeout""",
    "--standalone --module --no-python --run-path --virtual-local-rank --help",
    "-m=--module -r=--redirects -t=--tee -h=--help",
    abbreviates=True,
)
_LAUNCH = Syntax(_TORCHRUN.valued, _TORCHRUN.flags | {"--use-env"}, _TORCHRUN.same, abbreviates=True)
#: Options of the parts of Accelerate, by the start of their names.
_ACCELERATE_PARTS = {
    "fp8": """
        amax-compute-algo amax-history-len backend enable-fsdp-float8-all-gather format interval margin opt-level
        override-linear-precision pad-inner-dim
    """,
    "fsdp": """
        activation-checkpointing activation-checkpointing-offload auto-wrap-policy backward-prefetch
        backward-prefetch-policy cpu-ram-efficient-loading forward-prefetch min-num-params offload-params
        reshard-after-forward sharding-strategy state-dict-type sync-module-states transformer-layer-cls-to-wrap
        use-orig-params version
    """,
    "megatron-lm": """
        attention-backend attention-dropout attention-softmax-in-fp32 calculate-per-token-loss context-parallel-size
        decoder-last-pipeline-num-layers eod-mask-loss expert-model-parallel-size expert-tensor-parallel-size
        gradient-clipping hidden-dropout no-load-optim no-save-optim num-micro-batches optimizer-cpu-offload
        overlap-cpu-optimizer-d2h-h2d pp-degree recompute-activations recompute-granularity recompute-method
        recompute-num-layers sequence-parallelism tp-degree use-custom-fsdp use-distributed-optimizer
        use-precision-aware-optimizer use-rotary-position-embeddings
    """,
    "parallelism-config": """
        cp-backend cp-comm-strategy cp-size dp-replicate-size dp-shard-size sp-attn-implementation sp-backend
        sp-seq-length sp-seq-length-is-variable sp-size tp-size
    """,
}
#: accelerate/commands/launch.py of Accelerate 0.17 to 1.15.
_ACCELERATE = _syntax(
    " ".join(f"--{start}-{rest}" for start, names in _ACCELERATE_PARTS.items() for rest in names.split())
    + """ --config-file --mixed-precision --num-processes --num-machines --num-cpu-threads-per-process --dynamo-backend
    --dynamo-mode --gpu-ids --machine-rank --main-process-ip --main-process-port --tee --log-dir --role --rdzv-backend
    --rdzv-conf --max-restarts --monitor-interval --vm --env --main-training-function --deepspeed-config-file
    --zero-stage
    --offload-optimizer-device --offload-param-device --offload-optimizer-nvme-path --offload-param-nvme-path
    --gradient-accumulation-steps --gradient-clipping --zero3-init-flag --zero3-save-16bit-model --deepspeed-hostfile
    --deepspeed-exclusion-filter --deepspeed-inclusion-filter --deepspeed-multinode-launcher
    --deepspeed-moe-layer-cls-names --mpirun-hostfile --mpirun-ccl --aws-access-key-id --aws-secret-access-key""",
    """--quiet --cpu --multi-gpu --tpu --enable-cpu-affinity --dynamo-use-fullgraph --dynamo-use-dynamic --use-deepspeed
    --use-fsdp --use-megatron-lm --same-network --module --no-python --tpu-cluster --no-tpu-cluster --tpu-use-sudo
    --downcast-bf16 --debug --help --use-parallelism-config --dynamo-use-regional-compilation
    --fp8-use-autocast-during-eval --ipex --mps --use-xpu""",
    "-m=--module -q=--quiet -t=--tee -h=--help",
)
#: deepspeed/launcher/runner.py of DeepSpeed 0.14 to 0.18.
_DEEPSPEED = _syntax(
    """--hostfile --include --exclude --num-nodes --min-elastic-nodes --max-elastic-nodes --num-gpus --master-port
    --master-addr --node-rank --launcher --launcher-args --autotuning --bind-core-list --ssh-port --comment --account
    --enable-each-rank-log --venv-script --num-accelerators""",
    """--module --no-python --no-local-rank --no-ssh-check --force-multi --elastic-training --bind-cores-to-rank
    --no-ssh --save-pid --help""",
    "-H=--hostfile -i=--include -e=--exclude -h=--help --num-accelerators=--num-gpus",
)
#: Open MPI 4 and 5, Hydra of MPICH and Intel MPI, and PALS of HPE Cray.
_MPIRUN = _syntax(
    """-n -H --hostfile --map-by --bind-to --rank-by -wdir --npernode --prefix --report-uri --output-filename
    --tag-output-to --timeout --oversubscribe-to --ppr --rankfile -bootstrap --launcher -iface -hosts --personality
    --output --tmpdir --path --depth --cpu-bind --mem-bind --gpu-bind --rlimits --pmi -envlist""",
    """--oversubscribe --allow-run-as-root --bind-to-none --report-bindings --tag-output --display-map --nooversubscribe
    --bynode --bysocket --byslot -v -q -l --verbose --quiet -prepend-rank --enable-recovery --timestamp-output""",
    """-np=-n --np=-n --n=-n -c=-n -host=-H --host=-H -hostfile=--hostfile -machinefile=--hostfile -f=--hostfile
    --machinefile=--hostfile -npernode=--npernode -N=--npernode -ppn=--npernode -perhost=--npernode --ppn=--npernode
    --wdir=-wdir -map-by=--map-by -bind-to=--bind-to -rank-by=--rank-by -hosts=-H
    --hosts=-H -d=--depth""",
)
#: ssh(1) of OpenSSH 9.
_SSH = _syntax(
    "-B -b -c -D -E -e -F -I -i -J -L -l -m -O -o -p -Q -R -S -W -w",
    "-4 -6 -A -a -C -f -G -g -K -k -M -N -n -q -s -T -t -V -v -X -x -Y -y",
    attaches=True,
)
#: pdsh(1) 2.34.
_PDSH = _syntax(
    "-w -x -l -t -u -f -o -R -M -g -X -P -j -a", "-S -b -k -N -d -s -q -V -L -h -n", attaches=True
)  # fmt: skip
_PBSDSH = _syntax("-n -c -h", "-o -s -u -v -e -E", attaches=True)

#: Programs that run the command that follows their options, here: valued options and flags of each.
WRAPPERS = {
    "nohup": ("", ""),
    "time": ("-f -o", "-p -v"),
    "exec": ("-a", "-c -l"),
    "command": ("", "-p"),
    "nice": ("-n --adjustment", ""),
    "ionice": ("-c -n", "-t"),
    "setsid": ("", "-f -w -c"),
    "stdbuf": ("-i -o -e", ""),
    "numactl": ("-m -N -C -i -p --membind --cpunodebind --physcpubind --interleave", "-l --localalloc --all"),
    "taskset": ("-c --cpu-list", ""),
    "timeout": ("-s -k --signal --kill-after", "--foreground --preserve-status"),
    "env": ("-u --unset -C --chdir", "-i"),
    "sudo": ("-u -g", "-E -H -n -S"),
    "unbuffer": ("", "-p"),
    "catchsegv": ("", ""),
    "nsys": ("", ""),
}
SYNTAX = {
    "srun": _SBATCH,
    "sbatch": _SBATCH,
    "salloc": _SBATCH,
    #: qsub(1B) of OpenPBS and Torque, qsub(1) of Grid Engine.
    "qsub": _syntax(
        "-a -A -c -C -d -e -j -J -k -l -m -M -N -o -p -P -q -r -S -t -u -v -w -W", "-h -I -V -X -z -f -cwd"
    ),
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _LAUNCH,
    "accelerate": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "mpirun.openmpi": _MPIRUN,
    "mpiexec.openmpi": _MPIRUN,
    "mpiexec.hydra": _MPIRUN,
    "orterun": _MPIRUN,
    "ssh": _SSH,
    "pdsh": _PDSH,
    "clush": _syntax("-w -x -g -X -l -t -u -f -o --hostfile", "-a -b -B -L -S -q -v -N -n", attaches=True),
    "pbsdsh": _PBSDSH,
    "pbs_tmrsh": _syntax("-l", "-n"),
    "blaunch": _syntax("-z -u", "-n"),
    **{name: _syntax(valued, flags, attaches=True) for name, (valued, flags) in WRAPPERS.items()},
}


def read_options(words: Sequence[Word], syntax: Syntax) -> Call:
    """Split the words after a program into its options and what follows them."""
    given: list[Given] = []
    position = 0
    while position < len(words):
        word = words[position]
        typed = word.prefix.partition("=")[0]
        if not typed.startswith("-") or typed == "-":
            break
        position += 1
        if word.value == "--":
            break
        name, value = _split(word, typed, syntax)
        if value is None and name in syntax.valued and position < len(words):
            value = words[position]
            position += 1
        if syntax is _MPIRUN and name in _SETTING and value is not None:
            name = "-x"  # --env=NAME=VALUE
        elif syntax is _MPIRUN and value is None and position < len(words):
            if name == "-x" or (name in _SETTING and "=" in words[position].prefix):
                name, value, position = "-x", words[position], position + 1
            elif name in _PAIRS and position + 1 < len(words):
                position += 2
        given.append(Given(name, typed, value or Word((), word.end, word.end), word.at))
    return Call(tuple(given), tuple(words[position:]), syntax)


#: Options of mpirun that set a variable: NAME VALUE for Hydra, NAME=VALUE for PALS and MVAPICH; those of two words.
_SETTING = {"-genv", "--genv", "-env", "--env"}
_PAIRS = {"--mca", "-mca", "--gmca", "--prtemca"} | _SETTING


def _split(word: Word, typed: str, syntax: Syntax) -> tuple[str, Word | None]:
    """Return the name of an option and its value, if that stands in the same word."""
    is_long = typed.startswith("--")
    if "=" in word.prefix and (is_long or not syntax.attaches):
        return syntax.canonical(typed), word.after("=")
    short = syntax.canonical(typed[:2])
    if not is_long and syntax.attaches and (short in syntax.valued) and len(word.shown) > 2:
        first = word.parts[0]
        cut = word.after(first.text[:2]) if first.kind == "text" and len(first.text) >= 2 else None
        return short, cut
    return syntax.canonical(typed), None


#: The call of a program that is not known here, or that is none.
NO_CALL = Call((), (), _syntax("", ""))


def read_call(command: Command | None) -> Call:
    """Return the options of a command, which keeps them; none if its program is not known here."""
    if command is None or command.name not in SYNTAX:
        return NO_CALL
    kept: dict[str, Call] = vars(command)  # As cached_property does: the syntax is not known to the model.
    if "call" not in kept:
        kept["call"] = read_options(command.args, SYNTAX[command.name])
    return kept["call"]
