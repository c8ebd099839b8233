"""Files and file systems, checkpoints, and what limits a process."""

from __future__ import annotations

from allranks.diagnosis.model import Level, after_a_change, as_it_is, never, on_other_nodes

#: What only torch and safetensors say of a file.
_OF_A_SAVED_FILE = (
    r"PytorchStreamReader failed|invalid header or archive is corrupted|storage has wrong (?:byte )?size"
    r"|unexpected EOF(?:, expected \d+ more bytes|\. The file)|SafetensorError|Error while deserializing header"
    r"|Unable to load weights from \w+ checkpoint file|file in archive is not in a subdirectory"
    r"|Invalid magic number; corrupt file|MetadataIncompleteBuffer|HeaderTooLarge"
)
#: Frames that load a checkpoint: pickle says the same of any bytes.
_LOADS = r"torch[/\\]serialization\.py|\btorch\.load\b|load_(?:state_dict|checkpoint|ckpt)|ctx\.checkpoints"

#: What names a repository of Hugging Face's hub: the hub may not have been reached.
_OF_A_HUB = r"'[\w-][\w.-]*(?:/[\w.-]+)?'"

#: What a script says is not there.
_A_FILE = r"(?<!executable )(?:[Ff]iles?|[Dd]irectory|[Pp]ath|[Cc]heckpoint|[Dd]ataset|[Ww]eights)"

#: What only a load of a checkpoint says.
_OF_A_STATE = (
    r"Error\(s\) in loading state_dict|(?:Missing|Unexpected) key\(s\) in state_dict"
    r"|[Ss]ize mismatch (?:for \S+: copying a param|between saved )|'(?:unexpected|missing) keys? .*in state_dict"
    r"|loaded state dict (?:contains a parameter group|has a different number)"
    r"|Unable to load \w+ from checkpoint(?! file)|Missing key in checkpoint state_dict"
    r"|KeyError: '(?:state_dict|model_state_dict|optimizer)'"
    r"|KeyError: .*not found in (?:the )?(?:checkpoint|state_dict)"
)

RULES = (
    after_a_change(
        "no-space",
        "a disk, or /dev/shm, is full",
        r"^OSError: \[Errno 28\] No space left on device$",
        fix="df -h and df -i on that node, /dev/shm as well (docker run --shm-size 16g): remove what is old there",
        certain=False,
        source="errno(3)",
    ),
    after_a_change(
        "disk-full",
        "a disk is full",
        r"No space left on device|\[Errno 28\]|ENOSPC|low on resource: ephemeral-storage|database or disk is full",
        r"It appears as if there is not enough space for \S+",
        r"^warning: (?!/dev/shm)\S+ is full: ",
        fix="df -h and df -i on that node show which: remove what is old, or write elsewhere",
        source="errno(3)",
        despite=r"^OSError: \[Errno 28\] No space left on device$",  # no-space, unless the node has told which is full.
        explains=("save-failed", "no-space"),
    ),
    after_a_change(
        "quota",
        "a disk quota is used up",
        r"Disk quota exceeded|\[Errno 122\]|EDQUOT",
        fix="quota -s shows the limits: remove what is old, or write to another file system",
        source="errno(3)",
        explains=("save-failed",),
    ),
    as_it_is(
        "stale-file-handle",
        "a file was replaced or removed on its server while it was open",
        r"Stale (?:NFS )?file handle|\[Errno 116\]|ESTALE",
        fix="nothing may replace files of a run that goes on; if only one node says so, leave it out (--exclude NODE)",
        source="nfs(5)",
    ),
    after_a_change(
        "read-only-file-system",
        "the file system is mounted read-only",
        r"Read-only file system|\[Errno 30\]|EROFS",
        fix="write elsewhere (HOME and cache variables too); if it should be writable, leave the node out",
        source="errno(3)",
    ),
    after_a_change(
        "save-failed",
        "a file could not be written: the disk is full or failed",
        r"RuntimeError: write\(\): fd \d+ failed with Input/output error|PytorchStreamWriter failed writing",
        r"^RuntimeError: File \S+ cannot be opened",
        r"inline_container\.cc:\d+\] ?\.? unexpected pos \d+|^OSError: \d+ requested and \d+ written",
        r"write error: wrote \d+ \w+ instead of \d+",
        fix="df -h of where it saves, and its quota; write elsewhere if the disk fails",
        certain=False,
        source="torch/csrc/serialization.cpp",
    ),
    on_other_nodes(
        "input-output-error",
        "a file system failed (input/output error)",
        r"Input/output error|\[Errno 5\] |transport endpoint shutdown|Transport endpoint is not connected",
        r"Remote I/O error|\[Errno (?:70|108|112)\]",
        despite=r"^tcsetattr: ",  # The terminal is gone.
        fix="the disk, its server or the network to it is at fault: another file system, or other nodes",
        source="errno(3)",
    ),
    after_a_change(
        "file-locked",
        "a file is locked by another process, or its file system has no locks",
        r"unable to lock file|[Nn]o locks available|\[Errno 37\]|database is locked|filelock\.\S*Timeout",
        fix="one process opens it for writing at a time; HDF5_USE_FILE_LOCKING=FALSE if it is only read; caches and "
        "locks on a disk that has them",
        source="flock(2); HDF5",
    ),
    after_a_change(
        "too-many-open-files",
        "a process has too many files open",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata|EMFILE",
        fix="ulimit -n 65536 in environment.setup, or torch.multiprocessing.set_sharing_strategy('file_system')",
        source="getrlimit(2); torch.multiprocessing",
    ),
    after_a_change(
        "too-many-processes",
        "no more processes or threads can be started",
        r"can't start new thread|pthread_create (?:failed|returns \d)|[Tt]hread creation failed",
        r"fork: (?:retry: )?(?:Resource temporarily unavailable|No child processes)",
        r"(?:system_error|what\(\)).*: +Resource temporarily|BlockingIOError: \[Errno 11\] Resource temporarily",
        r"OpenBLAS blas_thread_init|libgomp: Thread creation failed",
        fix="OMP_NUM_THREADS=1 and fewer data loader workers, or a higher ulimit -u",
        source="getrlimit(2)",
    ),
    never(
        "checkpoint-unsafe",
        "the checkpoint holds more than tensors, and torch.load refuses it",
        r"Weights only load failed|WeightsUnpickler error|weights_only.*(?:default|argument)",
        fix="torch.load(path, weights_only=False) if you trust the file, or "
        "torch.serialization.add_safe_globals([...])",
        source="docs.pytorch.org: torch.load, since 2.6",
    ),
    after_a_change(
        "checkpoint-damaged",
        "a checkpoint is damaged or incomplete",
        _OF_A_SAVED_FILE,
        r"not a ZIP archive|File is not a zip file|BadZipFile|EOFError: Ran out of input",
        r"UnpicklingError: (?!Weights only)|invalid load key|pickle data was truncated",
        fix="start from the one before it; allranks checkpoint verify checks those of allranks",
        near=rf"{_OF_A_SAVED_FILE}|{_LOADS}",
        source="caffe2/serialize/inline_container.cc",
    ),
    never(
        "state-dict",
        "the checkpoint does not fit the model",
        _OF_A_STATE,
        r"Error: .*(?:(?:[Ss]ize|[Ss]hape)s? mismatch|must match the size|[Uu]nexpected key|[Mm]issing key)",
        near=rf"{_OF_A_STATE}|{_LOADS}",
        fix="the same model settings as when it was saved; keys that start with 'module.' are DDP's: save model.module",
        source="torch/nn/modules/module.py",
    ),
    after_a_change(
        "checkpoint-world-size",
        "the checkpoint was saved with {saved}[ {kind}] ranks, and this job has {now}",
        r"Loading a checkpoint for MP=(?P<saved>\d+) but world size is (?P<now>\d+)",  # Llama's.
        r"loaded used a (?P<kind>DP) world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
        fix="as many ranks as when it was saved, or convert it with DeepSpeed's ds_to_universal.py",
        source="deepspeed/runtime/engine.py",
    ),
    never(
        "pickling",
        "an object cannot be sent to another process",
        r"[Cc]an't pickle|[Cc]annot (?:be )?pickle|can't be pickled|refusing to serialize non-leaf tensor",
        r"Can't get (?:local object|attribute .* on <module)|cannot serialize a ",
        fix="define functions and classes at the top of a module, with no lambda, open file or lock in the dataset",
        source="docs.python.org: pickle",
    ),
    after_a_change(
        "permission-denied",
        "no permission to read, write or run a file",
        r"PermissionError|\[Errno 13\]|EACCES",
        r"^(?!.*(?:\(public|please try again)).*: [Pp]ermission denied",
        despite=r"\b(?:pyxis|enroot)\b",  # The container's own directories.
        fix="ls -ld FILE on that node, as the user of the job; caches and outputs go where you may write",
        certain=False,
        source="errno(3)",
    ),
    never(
        "script-not-found",
        "the script is not there",
        r"can't open file '?(?P<file>[^']+)'?: \[Errno 2\]",
        r"(?:No module named|Error while finding module specification for) '?\S*__main__\b",
        r"can't find '__main__' module in|cannot execute binary file",
        r"execve\(\): (?P<file>\S+\.(?:py|sh)): No such file",
        fix="the path counts from where the job starts: give an absolute one, on a disk that all nodes see",
        source="python(1)",
    ),
    after_a_change(
        "data-damaged",
        "a file of the data is empty, damaged or of another format",
        r"cannot identify image file|[Ii]mage file is truncated|file signature not found|truncated file: eof",
        r"\bArrowInvalid: (?:JSON parse error|Not a|Parquet m)|!_?src\.empty\(\)",
        fix="open the file that the dataset reads there; copy or download it again, or leave it out",
        level=Level.GENERAL,
        certain=False,
        source="PIL/Image.py; h5py; pyarrow; OpenCV, which reads None from a file that is not there",
    ),
    after_a_change(
        "dataset-empty",
        "the dataset is empty",
        r"Error: Found 0 (?:images|files)|\bgot num_samples=0$",
        r"^(?:\w+\.)*\w*(?:Error|Exception): (?:.*: )?[Nn]o (?:images|labels|samples|data) found (?:in|at) ",
        fix="list what its path and pattern find on that node: a relative path starts from the ranks' --workdir",
        level=Level.GENERAL,
        certain=False,
        source="torch/utils/data/sampler.py; torchvision/datasets/folder.py",
    ),
    after_a_change(
        "file-not-found",
        "a file is not there",
        r"FileNotFoundError|\[Errno 2\] No such file or directory",
        r"OSError: Can't load (?:the )?(?:tokenizer|model|config\w*|weights|\w+ (?:extractor|processor)) (?:for|of) "
        rf"(?!{_OF_A_HUB})",
        r"Unable to find latest file at|Incorrect path_or_model_id|HFValidationError: Repo id must",
        r"No valid checkpoint found|Error: (?:Can(?:'t|not)|Could(?:n't| not)) find .*(?:file|checkpoint|director)",
        r"^(?:\w+\.)*(?!Import)\w*Error: (?!.*shared object).*No such file or directory",
        rf"^(?:\w+\.)*\w*(?:Error|Exception): .*{_A_FILE}\b.* does(?: not|n't) exist",
        rf"^(?:\w+\.)*\w*(?:Error|Exception): (?:.* )?{_A_FILE}(?:[: ]+\S*[/.'\"]\S*)? (?:is |was |were )?not found",
        r"^(?:\w+\.)*\w*(?:Error|Exception): (?:.*: )?[Nn]o checkpoints? found (?:in|at) ",
        r"^(?:\w+\.)*\w*(?:Error|Exception): .*\(os error 2\)",  # Rust's, of tokenizers and safetensors.
        r"(?:Dataset|Repository|Revision|(?<!Local)Entry)NotFoundError",
        r"NotADirectoryError|does not appear to have a file named|Error no file named",
        r"is not a local folder and is not a valid model identifier",
        r"[Uu]nable to open file .*No such file|RuntimeError: open\(.*No such file",
        r"^(?:\S+: )?(?:cannot access|cannot stat|line \d+: \S+:) .*No such file or directory",
        r"^AssertionError: assert\b(?! not).*\b(?:exists|isfile|isdir|is_file|is_dir)\(",
        fix="correct the path: a relative one starts from the ranks' --workdir, and every node needs the file",
        level=Level.GENERAL,
        source="errno(3)",
    ),
)
