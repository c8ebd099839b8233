"""Environments: what is installed, and what is not; the network to the outside."""

from __future__ import annotations

from allranks.diagnosis.model import Level, after_a_change, as_it_is, never

#: What only clients of servers on the internet say.
_OF_THE_HUB = (
    r"couldn't connect to '?https?://|We couldn't connect to|Couldn't reach|Connection error, and we cannot find the"
    r"|Max retries exceeded with url|LocalEntryNotFoundError|OfflineModeIsEnabled"
    r"|ProxyError|urlopen error|(?:Read|Connect)Timeout(?:Error)?\b.*(?:huggingface|https?)"
    r"|OSError: Can't load (?:the )?\w+(?: \w+)? (?:for|of) '[\w-][\w.-]*(?:/[\w.-]+)?'"  # The hub's name of a model.
    r"|RemoteDisconnected\(|ProtocolError\(|thrown while requesting [A-Z]+ https?:"
    r"|IncompleteRead\(|(?:HTTP Error )?\b50[0234] Server Error|HTTP Error 50[234]"
    r"|Could not resolve host: |Could not connect to the endpoint URL|Failed to connect to \S+ port 443"
    r"|FSTimeoutError|wandb.*(?:[Nn]etwork error|timed out)|CommError"
    r"|^(?:requests|urllib3|httpx|aiohttp)\.\S*(?:Connect|Timeout|Protocol|SSL)\w*"
)
#: Frames of a request over HTTP.
_REQUESTS = r"(?:urllib3?|http|requests|httpx|httpcore|aiohttp|huggingface_hub|wandb)[/\\][\w/\\]+\.py"

RULES = (
    never(
        "module-missing",
        "an environment module is not there",
        r"\b(?:module|ml): (?:command )?not found",
        r"Unable to locate a modulefile for|Lmod has detected the following error|ModuleCmd_Load",
        r"The following module\(s\) are unknown",
        explains=("import-missing",),
        fix="module avail on a compute node lists them: batch jobs may need . /etc/profile.d/modules.sh first",
        source="Lmod; Environment Modules",
    ),
    never(
        "conda-missing",
        "the conda environment cannot be activated",
        r"conda: (?:command )?not found",
        r"EnvironmentNameNotFound|EnvironmentLocationNotFound|Could not find conda environment",
        r"Your shell has not been properly configured to use 'conda activate'|Run 'conda init' before",
        r"CondaError|Error while loading conda plugins|conda\S*: No such file|: activate: No such file",
        explains=("import-missing",),
        fix="name it by its path in environment.conda; conda must be found on the nodes as well",
        despite=r"conda deactivate",
        source="conda activate --help",
    ),
    never(
        "venv-missing",
        "there is no virtual environment[ {venv}]",
        r"(?:^|\s)(?P<venv>\S+)/bin/activate: No such file or directory",
        r"environment\.venv: there is no virtual environment at (?P<venv2>[^;:]+)",
        explains=("import-missing",),
        fix="make it on the machine that says so, or correct environment.venv",
        source="venv: Python's documentation",
    ),
    never(
        "command-not-found",
        "a command[, {command},] is not there",
        r"(?:line \d+|sh: \d+|(?:^|message: )(?:/\S+/|-)?(?:ba|z|k)?sh): (?P<command>[\w.+/-]+): "
        r"(?:command )?not found$",
        r": \$'\\r': command not found$|: (?P<command5>\S+): bad interpreter: No such file",  # Line breaks of DOS.
        r"\[Errno 2\] No such file or directory: '(?P<command>torchrun|python3?|srun|sbatch|qsub|mpirun|mpiexec"
        r"|accelerate|deepspeed|ssh|ninja|git|gcc|nvidia-smi)'",
        r"execv\w*\(\): (?P<command>[\w./-]+): No such file|execvp error on file (?P<command4>\S+) \(No such file",
        r"\"?(?P<command6>[\w./-]+)\"?: executable file not found in \$PATH",
        r"launcher '(?P<command7>\w+)' not installed|Could not detect \"(?P<command10>\w+)\", are you indeed",
        r"mpi(?:run|exec) was unable to (?:find|launch) the specified (?:executable|application)",
        r"which: no (?P<command>\S+) in|No such command: (?P<command2>\S+)|\benv: '?(?P<command3>[^':]+)'?: No such",
        r"^(?P<command8>[\w.+/-]+): command not found$|^zsh: command not found: (?P<command9>\S+)",
        despite=r"/slurm_script: No such file",  # A node of Slurm has lost the script of the job.
        fix="activate the environment that has it (environment.venv, .conda or .setup), or give its path",
        source="bash(1): exit status 127",
    ),
    after_a_change(
        "container",
        "the container could not start",
        r"FATAL: +(?:container|Unable|could not|While|Image)",
        r"(?:pyxis|spank_pyxis)\S*: (?!import|creat|start|remov|skipp|running|printing)",
        r"(?:apptainer|singularity|enroot|pyxis|docker|podman)\S*: (?:[Ee]rror|fatal|FATAL)",
        r"permission denied while trying to connect to the Docker daemon",
        r"Cannot connect to the Docker daemon|starting container process caused",
        r"enroot-\w+: failed|create user namespace|Failed to pull image|(?:Err)?ImagePull(?:BackOff)?",
        r"SPANK plugin \"pyxis\" option",
        r"could not select device driver \"?\"? ?with capabilities|OCI runtime (?:create|exec) failed",
        r"nvidia-container-cli: |failed to create shim task|\[ERROR\] (?:Could not|No such file or directory: .*sqsh)",
        fix="run the image by hand on a compute node; its path, the bind mounts and --nv or --gpus are the usual "
        "reasons",
        level=Level.GENERAL,  # The lines around it may say why.
        source="Apptainer, enroot, Docker",
    ),
    after_a_change(
        "compiler-missing",
        "a compiler, the CUDA toolkit or a header[ ({header})] is not there",
        r"Failed to find C compiler|CUDA_HOME environment variable is not set|Ninja is required to load C\+\+",
        r"CUDA_HOME does not exist|No such file or directory: '\S*(?:nvcc|g\+\+|gcc)'|nvcc: (?:command )?not found",
        r"InvalidCxxCompiler|cannot find -lcuda|Python\.h: No such file",
        r"CUDAMismatchError.*(?!.*version)|MissingCUDAException|nvcc was not found",
        r"command '\S*(?:cc|\+\+|clang)' failed: No such file",
        r"fatal error: '?(?P<header>[\w./+-]+\.h(?:pp|xx)?)'?(?:: No such file| file not found)",
        fix="install gcc or load a compiler and the CUDA toolkit (environment.modules), and set CC and CUDA_HOME",
        source="torch/utils/cpp_extension.py",
    ),
    never(
        "cuda-version-mismatch",
        "the CUDA toolkit is not the version that PyTorch was built with",
        r"detected CUDA version \([\d.]+\) mismatches the version that was used to compile",
        r"Installed CUDA version [\d.]+ does not match the version torch was compiled with",
        r"(?:only supported on|requires) CUDA [\d.]+ (?:and|or) (?:above|newer|later|higher)",
        fix="load the toolkit of torch.version.cuda, or install the PyTorch of this toolkit",
        despite=r"accepting this combination",
        source="torch/utils/cpp_extension.py",
    ),
    never(
        "compile-failed",
        "torch.compile or an extension failed to compile",
        r"BackendCompilerFailed|InductorError|torch\._dynamo\.exc\.\w+|torch\._inductor\.exc\.\w+",
        r"CompilationError|PTXASError|ptxas (?:fatal|error)|Error building extension|nvcc fatal",
        r"PassManager::run failed|Triton PTX codegen error",
        r"triton\.\S*\.(?:OutOfResources|CompilationError)|Failed building wheel for",
        r"Error compiling objects for extension|ninja: build stopped|^FAILED: \S+\.o\b",
        r"torch_extensions/\S+\.so: cannot open shared object",
        r"(?:CalledProcessError: Command|error: command) '?\[?'\S*(?:cc|\+\+|clang|ptxas|ninja|cmake)'.* exit ",
        fix="run it without torch.compile to see whether the model itself works; TORCH_LOGS=+dynamo shows more",
        level=Level.GENERAL,
        certain=False,
        source="torch/_dynamo/exc.py",
    ),
    never(
        "glibc-too-old",
        "the node's C or C++ library is too old for a binary",
        r"version `?(?P<name>(?:GLIBCXX|GLIBC|CXXABI|LIBGOMP)_[\d.]+)'? (?:not found|not defined)",
        fix="a build for this system, a container, or other nodes; for GLIBCXX alone conda's libstdcxx-ng",
        source="ld.so(8)",
    ),
    never(
        "undefined-symbol",
        "a binary package was built for another version of PyTorch or CUDA",
        r"undefined symbol: (?P<symbol>\w+)",
        r"compiled with different CUDA (?:major )?versions|DLL load failed|symbol lookup error|Symbol not found",
        r"operator torchvision::\w+ does not exist|Couldn't load custom C\+\+ ops",
        fix="install it again for this PyTorch: pip install --force-reinstall --no-deps --no-build-isolation PACKAGE",
        source="ld.so(8)",
    ),
    never(
        "library-missing",
        "a library[, {library},] is not there",
        r"(?P<library>[\w.+-]+\.so[\w.]*): cannot open shared object file",
        r"(?:[Cc]ould not|[Uu]nable to|[Cc]annot) (?:find|load)(?: the)?(?: dynamic)? (?:library |lib\w* )?"
        r"'?(?P<library2>lib(?!rary)[\w.+-]*\w)",
        r"OSError: (?P<library3>lib[\w.+-]+\.so[\w.]*): cannot",
        r"Unable to load any of \{?(?P<library7>lib[\w.+-]+)|CUDA Setup failed despite",
        r"(?i:CUDA SETUP: (?:Setup failed|Something unexpected happened|Required library version not found))",
        r"Could not load library (?P<library4>lib\S+)",
        r"nvrtc: error: failed to open (?P<library6>[\w.+-]+\w)",
        r"MKL FATAL ERROR: Cannot load \S*?(?P<library5>lib[\w.+-]+\.so[\w.]*)",
        fix="load the module or install the package that has it; libcudart, libcudnn and libnccl come with PyTorch's "
        "wheels, libcuda.so.1 with the driver (container: --nv or --gpus)",
        despite=r"mca_base_component|libnccl-net|dynamic library |NET/Plugin|torch_extensions",
        source="ld.so(8)",
    ),
    after_a_change(
        "openmp-conflict",
        "two packages brought different OpenMP libraries",
        r"OMP: Error #15|MKL_THREADING_LAYER=\w+ is incompatible with",
        fix="MKL_THREADING_LAYER=GNU in environment.variables; or PyTorch and NumPy both from conda, or both from pip",
        explains=("abort",),
        source="Intel MKL and LLVM OpenMP: their messages",
    ),
    never(
        "numpy-abi",
        "a package was built for another NumPy",
        r"numpy\.(?:dtype|ndarray) size changed",
        r"module compiled (?:using NumPy|against API version)|compiled using NumPy 1\.x cannot be run",
        r"_ARRAY_API not found|numpy\.core\.multiarray failed to import|Numpy is not available",
        r"All ufuncs must have type",
        fix="pip install 'numpy<2', or newer versions of the package that is named",
        source="numpy.org: NumPy 2.0 migration guide",
    ),
    never(
        "import-missing",
        "the package[ {module}] is not installed in this environment",
        r"(?:^|ModuleNotFoundError: )No module named '(?P<module>[^']+)'|^ModuleNotFoundError: (?!No module named)",
        r"^\S*python\S*: No module named (?P<module2>\S+)",
        r"ImportError: No module named '?(?P<module3>[\w.]+)",
        r"ImportError: .*\bpackage `?'?(?P<module4>[\w.-]+)'?`? (?:seems to be|is) not installed",
        r"(?:ImportError: .*|packages that were )not found in your environment: (?P<module5>[\w.-]+)",
        r"^You need to have (?P<module7>\w+) installed|ImportError: (?P<module8>\w+) is not available => install",
        r"ImportError: .*`?pip install (?P<module9>[\w.\[\]]+(?:-[\w.]+)*)(?![\w<>=~-])",
        r"because of the following error \(look up .*No module named '(?P<module12>[^']+)'",
        r"DistributionNotFound: The '(?P<module10>[^']+)'|^ERROR: No matching distribution found for (?P<module13>\S+)",
        r"PackageNotFoundError: .*metadata was found for (?P<module11>\S+)",
        r"ImportError: .*requires the (?P<module6>\S+) library but it was not found",
        despite=r"requires `?[\w.\[\]-]+ ?[<>=~]=",  # It may be there in another version.
        fix="install it where the job runs, or use the environment that has it: environment.venv or .conda",
        source="docs.python.org: exceptions",
    ),
    never(
        "import-name",
        "a package's version is not the one that this code expects",
        r"was removed in the NumPy 2\.0 release",
        r"cannot import name '(?P<name>[^']+)'",
        r"AttributeError: (?:module|type object) '(?P<module>[^']+)' has no attribute '(?P<name2>[^']+)'",
        r"Descriptors cannot (?:not )?be created directly|Error locating target '",  # The second one is Hydra's.
        r"(?:requires|is required) .*version .* but found|VersionConflict|but found \w+==",
        r"^ImportError: .*(?:requires|required) .*",
        r"but Transformers does not recognize this architecture|Tokenizer class \w+ does not exist or is not currently",
        despite=r"module 'torch\._C' has no attribute '_cuda_",  # A torch without CUDA.
        fix="install the versions that the script was written for; a file of your own may also hide the package",
        certain=False,
        source="docs.python.org: exceptions",
    ),
    never(
        "package-versions",
        "two packages' versions do not fit each other: {name} has no argument '{argument}'",
        r"^TypeError: (?P<name>[\w.]+\(\)) got an unexpected keyword argument '(?P<argument>\w+)'",
        inside=r"/(?:site|dist)-packages/(?!torch/)",  # torch calls the forward() of anybody.
        fix="pip check; install the versions of the package that calls it and of the one that is called which were "
        "released together, or those that the script was written for",
        level=Level.GENERAL,
        certain=False,
        source="docs.python.org: exceptions",
    ),
    after_a_change(
        "credentials",
        "a service refused the credentials, or was given none",
        r"(?:401|403) (?:Client Error|Forbidden|Unauthorized)|GatedRepoError|gated repo",
        r"Invalid (?:user token|credentials|API key)|api_key not configured|No API key configured",
        r"exceptions\.(?:Forbidden|Unauthorized): ",
        r"NoCredentialsError|DefaultCredentialsError",
        r"ClientError: An error occurred \((?:403|AccessDenied|ExpiredToken|Invalid\w+Id)",
        r"Unable to locate credentials|(?:must be|is not) (?:authenticated|logged in)",
        r"AuthenticationError|UsageError: .*wandb login",
        r"Access to model \S+ is restricted|Token is required|PermissionError\(.*wandb",
        r"CommError.*(?:permission|denied|401|403)|API key must be \d+ characters",
        despite=r"\b(?:pyxis|enroot)\b",  # A registry's, of a container.
        fix="export HF_TOKEN or WANDB_API_KEY before you start the job (--env names it on PBS), and accept the "
        "model's terms on its page",
        certain=False,
        source="huggingface_hub; wandb",
    ),
    as_it_is(
        "hub-limit",
        "a server on the internet got too many requests, and refused more",
        r"(?:429|403).*(?:Too Many Requests|rate limit)|[Rr]ate limit (?:exceeded|reached)|RateLimitError",
        r"An error occurred \((?:SlowDown|Throttling\w*|TooManyRequests\w*|RequestLimitExceeded)\)",
        fix="download once, before the job, and set HF_HUB_OFFLINE=1: each rank of each job asks the server otherwise",
        explains=("credentials", "hub-unreachable"),
        source="RFC 6585: status 429",
    ),
    after_a_change(
        "certificate",
        "a server's certificate is not trusted",
        r"CA certificate bundle|CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLCertVerificationError",
        fix="set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the site's certificates",
        source="docs.python.org: ssl",
    ),
    after_a_change(
        "hub-unreachable",
        "the node does not reach a server on the internet",
        _OF_THE_HUB,
        r"^(?:\w+\.)*(?:gaierror|OSError|TimeoutError|timeout|Connect\w+|\w*Timeout|Connection\w*Error)\b",
        near=rf"{_OF_THE_HUB}|{_REQUESTS}",
        fix="download before the job, on the login node, and set HF_HUB_OFFLINE=1 or WANDB_MODE=offline",
        certain=False,
        source="huggingface_hub; urllib3",
    ),
)
