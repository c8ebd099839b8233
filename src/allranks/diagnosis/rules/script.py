"""The script itself: arguments, exceptions, signals. They come last: all else is more telling."""

from __future__ import annotations

from allranks.diagnosis.model import Level, Rule

RULES = (
    Rule(
        id="launcher-arguments",
        cause="the launcher refused its arguments",
        patterns=(
            r"^(?:torchrun|run\.py|launch\.py|accelerate.*|deepspeed|lightning): error: .*",
            r"^(?:srun|sbatch|salloc): (?:unrecognized option|invalid option|error: Unrecognized|error: Invalid "
            r"argument).*",
            r"No slot '.*' specified on host",
            r"error: .*--(?:nproc[-_]per[-_]node|nnodes|rdzv[-_]\w+|master[-_]\w+|num_processes).*",
        ),
        fix="see its --help; scripts under torchrun read LOCAL_RANK from the environment, not --local-rank",
        retry="never",
        source="torch/distributed/run.py",
    ),
    Rule(
        id="arguments",
        cause="the script refused its arguments",
        patterns=(
            r"^(?:\S*\.py|\S+): error: (?:unrecognized arguments|the following arguments are required|argument "
            r"|invalid "
            r"choice|ambiguous option|too few).*",
            r"^(?:hydra|omegaconf)\.errors\.\w+|Could not override '.*'|Key '.*' is not in struct",
            r"ArgumentError|Some specified arguments are not used by",
        ),
        fix="the script's --help lists them; its own arguments follow --",
        retry="never",
        source="docs.python.org: argparse, exit code 2",
    ),
    Rule(
        id="syntax-error",
        cause="the script is not valid Python",
        patterns=(r"^(?:SyntaxError|IndentationError|TabError): (?P<why>.*)",),
        fix="fix the line it names; an older Python on the node may not know its syntax",
        retry="never",
        source="docs.python.org: exceptions",
    ),
    Rule(
        id="dataloader-worker-error",
        cause="the dataset raised {error} in a data loader worker",
        patterns=(r"\b(?P<error>\w+): Caught \w+ in DataLoader worker process \d+",),
        fix="see the traceback below it: it is of the dataset's own code; num_workers=0 makes it easier to debug",
        retry="never",
        level=Level.GENERAL,
        source="torch/_utils.py: ExceptionWrapper",
    ),
    Rule(
        id="illegal-instruction",
        cause="the CPU does not know an instruction of a binary (SIGILL)",
        patterns=(r"Illegal instruction|SIGILL|exitcode\s*: -4\b|exit code 132",),
        fix="the binary was built for newer CPUs: use other nodes, or install a build for these",
        retry="on other nodes",
        source="signal(7)",
    ),
    Rule(
        id="segmentation-fault",
        cause="a process crashed in native code (segmentation fault)[, in {library}]",
        patterns=(
            r"^kernel: .*segfault at \w+ ip .* in (?P<library>[^\s\[,]+)",
            r"[Ss]egmentation fault|SIGSEGV|exitcode\s*: -11\b|exits with return code = -11|[Ss]ignal(?: code)?:? "
            r"?11\b",
        ),
        fix="python -X faulthandler shows the line; suspect packages of other versions, and fork with threads",
        retry="after a change",
        level=Level.GENERAL,
        source="signal(7)",
        certain=False,
    ),
    Rule(
        id="abort",
        cause="a process aborted in native code (SIGABRT)",
        patterns=(
            r"terminate called|what\(\):|Fatal Python error: Aborted|SIGABRT|exitcode\s*: -6\b|double free"
            r"|free\(\): invalid",
            r"corrupted (?:size|double-linked)|malloc\(\): |\*\*\* stack smashing|exits with return code = -6",
        ),
        fix="the lines before it say why; python -X faulthandler shows where",
        retry="after a change",
        level=Level.UNCLEAR,
        source="signal(7)",
        certain=False,
    ),
    Rule(
        id="script-exception",
        cause="the script raised {error}",
        patterns=(
            r"^(?P<error>(?:Assertion|Attribute|EOF|Index|Key|Lookup|Name|NotImplemented|Overflow|Recursion|Type"
            r"|UnboundLocal"
            r"|Unicode\w*|Value|ZeroDivision)Error)(?::|$)",
        ),
        fix="see the traceback: its last frame in your own code is where to look",
        retry="never",
        level=Level.GENERAL,
        source="docs.python.org: exceptions",
    ),
    Rule(
        id="own-error",
        cause="{what}",
        patterns=(r"^allranks\.errors\.\w+: (?P<what>.+)",),
        fix="see the lines below it in the log: the error says what to do",
        retry="never",
        level=Level.GENERAL,
        source="allranks/errors.py",
        certain=False,  # It may be what a rank says that has lost another one.
    ),
    Rule(
        id="library-exception",
        cause="{error} was raised",
        patterns=(
            r"^(?P<error>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Warning|Iteration|Failure|Fault))(?::|$)",
            r"^(?P<error2>(?:\w+\.)+[A-Z]\w+): ",
        ),
        fix="see the traceback: its last frame in your own code is where to look",
        retry="never",
        level=Level.GENERAL,
        source="docs.python.org: exceptions",
        certain=False,
    ),
)
