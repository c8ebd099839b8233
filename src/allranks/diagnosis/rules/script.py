"""The script itself: arguments, exceptions, signals. They come last: all else is more telling."""

from __future__ import annotations

from allranks.diagnosis.model import Level, after_a_change, never, on_other_nodes

#: What launchers say of their arguments.
_OF_A_LAUNCHER = (
    r"^(?:torchrun|run\.py|launch\.py|accelerate.*|deepspeed|lightning): error: .*"
    r"|\b(?:srun|sbatch|salloc): unrecognized option|^(?:srun|sbatch|salloc): (?:invalid option|error: Unrecognized"
    r"|error: Invalid (?:argument|numeric value)).*"
    r"|^(?:mpirun|mpiexec|prterun|horovodrun): [Ee]rror: (?:unknown|unrecognized) |an attempt to run as root"
    r"|of the rendezvous endpoint '.*' must|No slot '.*' specified on host|Unsupported nproc_per_node value"
    r"|error: .*--(?:nproc[-_]per[-_]node|nnodes|rdzv[-_]\w+|master[-_]\w+|num_processes).*"
)

#: A key that is read or set, and that a configuration does not have.
_OF_A_KEY = r"^omegaconf\.errors\.Config(?:Attribute|Key)Error: (?:Missing key|Key)"

RULES = (
    never(
        "launcher-arguments",
        "the launcher refused its arguments",
        _OF_A_LAUNCHER,
        r"^ValueError: |^AttributeError: 'NoneType' object ",  # accelerate's, of an option that it has no value for.
        near=rf"{_OF_A_LAUNCHER}|in (?:determine_local_world_size|config_from_args|_validate_launch_command"
        r"|simple_launcher|multi_gpu_launcher)$",
        fix="see its --help (accelerate also needs accelerate config); scripts under torchrun read LOCAL_RANK from the "
        "environment, not --local-rank",
        source="torch/distributed/run.py",
    ),
    never(
        "arguments",
        "the script refused its arguments",
        r"^(?:\S*\.py|\S+): error: (?:unrecognized arguments|the following arguments are required|argument "
        r"|invalid choice|ambiguous option|too few).*",
        r"^(?:hydra|omegaconf)\.errors\.\w+|Could not override '.*'",
        r"^Error: (?:No such option|Missing (?:option|argument)|Invalid value for)|ArgumentError",
        r"Some (?:specified arguments|keys) are not used by|FATAL Flags parsing error: .*|Could not consume arg: ",
        fix="the script's --help lists them; they follow --, or are args in the job file",
        source="docs.python.org: argparse, exit code 2",
        despite=_OF_A_KEY,
        explains=("configuration-key",),
    ),
    never(
        "configuration-key",
        "the configuration has no key {key}",
        rf"{_OF_A_KEY} '?(?P<key>[\w.]+)",
        fix="set it (hydra: +KEY=VALUE), or use the configuration of the same version as the script",
        level=Level.GENERAL,
        source="omegaconf/errors.py",
    ),
    never(
        "syntax-error",
        "the script is not valid Python",
        r"^(?:SyntaxError|IndentationError|TabError): (?P<why>.*)",
        fix="fix the line it names; an older Python on the node may not know its syntax",
        source="docs.python.org: exceptions",
    ),
    never(
        "dataloader-worker-error",
        "the dataset raised {error} in a data loader worker",
        r"\bCaught (?P<error>\w+) in DataLoader worker process \d+",
        fix="see the original traceback, of the dataset's own code; num_workers=0 makes it easier to debug",
        level=Level.GENERAL,
        source="torch/_utils.py: ExceptionWrapper",
    ),
    on_other_nodes(
        "illegal-instruction",
        "the CPU does not know an instruction of a binary (SIGILL)",
        r"Illegal instruction|SIGILL|exitcode\s*: -4\b|exit code 132",
        fix="the binary was built for newer CPUs: use other nodes, or install a build for these",
        source="signal(7)",
    ),
    after_a_change(
        "floating-point-exception",
        "a process divided an integer by zero in native code (SIGFPE)",
        r"Floating point exception|SIGFPE|exitcode\s*: -8\b|exits with return code = -8",
        fix="python -X faulthandler shows the line; an empty input or a size of 0 is the usual reason",
        level=Level.GENERAL,
        source="signal(7)",
    ),
    after_a_change(
        "segmentation-fault",
        "a process crashed in native code (segmentation fault)[, in {library}]",
        r"^kernel: .*segfault at \w+ ip .* in (?P<library>[^\s\[,]+)",
        r"[Ss]egmentation fault|SIGSEGV|exitcode\s*: -11\b|exits with return code = -11|[Ss]ignal(?: code)?:? ?11\b",
        r"\b[Ee]xit(?:ed with)? (?:code|status):? (?:-11|139)\b",
        r"[Ee]xit ?code:? 3221225477\b|Windows fatal exception: access violation",
        despite=r"potential root causes",  # Ray names what it might be.
        fix="python -X faulthandler shows the line; suspect packages of other versions, and fork with threads",
        level=Level.GENERAL,
        certain=False,
        source="signal(7)",
    ),
    after_a_change(
        "abort",
        "a process aborted in native code (SIGABRT)",
        r"tasks? [\d,\-]+: Aborted|killed by signal: Aborted|^(?:\S+: line \d+: +\d+ )?Aborted(?:\s|$)",
        r"terminate called|what\(\):|Fatal Python error: Aborted|SIGABRT|exitcode\s*: -6\b|double free"
        r"|free\(\): invalid",
        r"corrupted (?:size|double-linked)|malloc\(\): |munmap_chunk\(\): |malloc\.c:\d+: ",
        r"\b[Ee]xit(?:ed with)? (?:code|status):? (?:-6|134)\b",
        r"\w:\d+: .*: Assertion `.*' failed",  # Of C: see assert(3).
        r"Trace/breakpoint trap|\*\*\* stack smashing|exits with return code = -6",
        fix="the lines before it say why; python -X faulthandler shows where",
        level=Level.UNCLEAR,
        despite=r"what\(\): +(?:Broken pipe|Connection reset by peer)$",  # Another rank ended.
        certain=False,
        source="signal(7)",
    ),
    never(
        "script-exception",
        "the script raised {error}",
        r"^(?P<error>Exception): \S",
        r"^(?P<error>(?:Assertion|Attribute|EOF|Index|Key|Lookup|Name|NotImplemented|Overflow|Recursion|Type"
        r"|UnboundLocal|Unicode\w*|Value|ZeroDivision|(?:_?pickle\.)?Unpickling)Error)(?:\s*:|$)",
        r"^(?P<error2>AssertionError)\s*assert\b",  # Of ranks that wrote at once.
        fix="see the traceback: its last frame in your own code is where to look",
        level=Level.GENERAL,
        source="docs.python.org: exceptions",
    ),
    never(  # It has no pattern: the agent records the message.
        "script-exit",
        "the script exited: {message}",
        fix="the script stopped itself with this message (sys.exit): act on it, or search for it in the code",
        level=Level.GENERAL,
        source="docs.python.org: sys.exit",
    ),
    never(
        "own-error",
        "{what}",
        r"^allranks\.errors\.\w+: (?P<what>.+)",
        fix="see the lines below it in the log: the error says what to do",
        level=Level.GENERAL,
        certain=False,  # It may be what a rank says that has lost another one.
        source="allranks/errors.py",
    ),
    never(
        "library-exception",
        "{error} was raised",
        r"^(?P<error>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Warning|Iteration|Failure|Fault))(?::|$)",
        r"^(?P<error2>(?:\w+\.)+[A-Z]\w+): ",
        fix="see the traceback: its last frame in your own code is where to look",
        level=Level.GENERAL,
        certain=False,
        vague=r"CheckpointException ranks|RayTaskError\(|TrainingFailedError",  # They hand another one on.
        source="docs.python.org: exceptions",
    ),
)
