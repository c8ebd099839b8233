"""Environments: what is installed, and what is not; the network to the outside."""

from __future__ import annotations

from allranks.diagnosis.model import Level, Rule

RULES = (
    Rule(
        id="module-missing",
        cause="an environment module is not there",
        patterns=(
            r"\b(?:module|ml): (?:command )?not found",
            r"Unable to locate a modulefile for|Lmod has detected the following error|ModuleCmd_Load",
            r"The following module\(s\) are unknown",
        ),
        fix="module avail on a compute node lists them: batch jobs may need . /etc/profile.d/modules.sh first",
        retry="never",
        source="Lmod; Environment Modules",
    ),
    Rule(
        id="conda-missing",
        cause="the conda environment cannot be activated",
        patterns=(
            r"conda: (?:command )?not found",
            r"EnvironmentNameNotFound|EnvironmentLocationNotFound|Could not find conda environment",
            r"Your shell has not been properly configured to use 'conda activate'|Run 'conda init' before",
            r"CondaError",
        ),
        despite=r"conda deactivate",
        fix="name it by its path in environment.conda; conda must be found on the nodes as well",
        retry="never",
        source="conda activate --help",
    ),
    Rule(
        id="venv-missing",
        cause="there is no virtual environment[ {venv}]",
        patterns=(
            r"(?:^|\s)(?P<venv>\S+)/bin/activate: No such file or directory",
            r"environment\.venv: there is no virtual environment at (?P<venv2>[^;:]+)",
        ),
        fix="make it on the machine that says so, or correct environment.venv",
        retry="never",
        source="venv: Python's documentation",
    ),
    Rule(
        id="command-not-found",
        cause="a command[, {command},] is not there",
        patterns=(
            r"(?:line \d+|sh: \d+|^(?:-?bash|sh|zsh)): (?P<command>[\w.+/-]+): (?:command )?not found$",
            r"\[Errno 2\] No such file or directory: '(?P<command>torchrun|python3?|srun|mpirun|accelerate"
            r"|deepspeed|ssh|"
            r"ninja|git|gcc)'",
            r"execv\w*\(?\)?:? ?(?P<command>[\w./-]+): No such file or directory",
            r"which: no (?P<command>\S+) in|No such command: (?P<command2>\S+)|/usr/bin/env: '(?P<command3>[^']+)'",
        ),
        fix="activate the environment that has it (environment.venv, .conda or .setup), or give its path",
        retry="never",
        source="bash(1): exit status 127",
    ),
    Rule(
        id="container",
        cause="the container could not start",
        patterns=(
            r"FATAL: +(?:container|Unable|could not|While|Image)|(?:pyxis|spank_pyxis)\S*: (?!import)",
            r"(?:apptainer|singularity|enroot|pyxis|docker|podman)\S*: (?:error|fatal|FATAL)",
            r"could not select device driver \"?\"? ?with capabilities|OCI runtime (?:create|exec) failed",
            r"nvidia-container-cli: |failed to create shim task|\[ERROR\] (?:Could not|No such file or directory: "
            r".*sqsh)",
        ),
        fix="run the image by hand on a compute node; its path, the bind mounts and --nv or --gpus are the usual "
        "reasons",
        retry="after a change",
        source="Apptainer, enroot, Docker",
    ),
    Rule(
        id="compiler-missing",
        cause="a compiler or the CUDA toolkit is not there",
        patterns=(
            r"Failed to find C compiler|CUDA_HOME environment variable is not set|Ninja is required to load C\+\+",
            r"CUDA_HOME does not exist|No such file or directory: '\S*(?:nvcc|g\+\+|gcc)'|nvcc: (?:command )?not found",
            r"InvalidCxxCompiler|cannot find -lcuda|Python\.h: No such file",
            r"CUDAMismatchError.*(?!.*version)|MissingCUDAException",
        ),
        fix="install gcc or load a compiler and the CUDA toolkit (environment.modules), and set CC and CUDA_HOME",
        retry="after a change",
        source="torch/utils/cpp_extension.py",
    ),
    Rule(
        id="cuda-version-mismatch",
        cause="the CUDA toolkit is not the version that PyTorch was built with",
        patterns=(
            r"detected CUDA version \([\d.]+\) mismatches the version that was used to compile",
            r"Installed CUDA version [\d.]+ does not match the version torch was compiled with",
        ),
        fix="load the toolkit of torch.version.cuda, or install the PyTorch of this toolkit",
        retry="never",
        despite=r"accepting this combination",
        source="torch/utils/cpp_extension.py",
    ),
    Rule(
        id="compile-failed",
        cause="torch.compile or an extension failed to compile",
        patterns=(
            r"BackendCompilerFailed|InductorError|torch\._dynamo\.exc\.\w+|torch\._inductor\.exc\.\w+",
            r"CompilationError|PTXASError|ptxas (?:fatal|error)|Error building extension",
            r"triton\.\S*\.(?:OutOfResources|CompilationError)",
        ),
        fix="run it without torch.compile to see whether the model itself works; TORCH_LOGS=+dynamo shows more",
        retry="never",
        level=Level.GENERAL,
        source="torch/_dynamo/exc.py",
        certain=False,
    ),
    Rule(
        id="glibc-too-old",
        cause="the node's C or C++ library is too old for a binary",
        patterns=(r"version `?(?P<name>(?:GLIBCXX|GLIBC|CXXABI|LIBGOMP)_[\d.]+)'? (?:not found|not defined)",),
        fix="a build for this system, a container, or other nodes; for GLIBCXX alone conda's libstdcxx-ng",
        retry="never",
        source="ld.so(8)",
    ),
    Rule(
        id="undefined-symbol",
        cause="a binary package was built for another version of PyTorch or CUDA",
        patterns=(r"undefined symbol: (?P<symbol>\w+)", r"DLL load failed|symbol lookup error|Symbol not found"),
        fix="install it again for this PyTorch: pip install --force-reinstall --no-deps --no-build-isolation PACKAGE",
        retry="never",
        source="ld.so(8)",
    ),
    Rule(
        id="library-missing",
        cause="a library[, {library},] is not there",
        patterns=(
            r"(?P<library>[\w.+-]+\.so[\w.]*): cannot open shared object file",
            r"[Cc]ould not (?:find|load)(?: the)?(?: dynamic)? (?:library|lib\w*) '?(?P<library2>lib[\w.+-]+)",
            r"OSError: (?P<library3>lib[\w.+-]+\.so[\w.]*): cannot",
            r"CUDA Setup failed despite|Could not load library (?P<library4>lib\S+)",
        ),
        fix="load the module or install the package that has it; libcudart, libcudnn and libnccl come with "
        "PyTorch's wheels, libcuda.so.1 with the driver (container: --nv or --gpus)",
        retry="never",
        despite=r"libnccl-net|dynamic library |NET/Plugin|torch_extensions",
        source="ld.so(8)",
    ),
    Rule(
        id="numpy-abi",
        cause="a package was built for another NumPy",
        patterns=(
            r"numpy\.(?:dtype|ndarray) size changed",
            r"module compiled (?:using NumPy|against API version)|compiled using NumPy 1\.x cannot be run",
            r"_ARRAY_API not found|numpy\.core\.multiarray failed to import|Numpy is not available",
        ),
        fix="pip install 'numpy<2', or newer versions of the package that is named",
        retry="never",
        source="numpy.org: NumPy 2.0 migration guide",
    ),
    Rule(
        id="import-missing",
        cause="the package {module} is not installed in this environment",
        patterns=(
            r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
            r"^\S*python\S*: No module named (?P<module2>\S+)",
            r"ImportError: No module named '?(?P<module3>[\w.]+)",
        ),
        fix="install it where the job runs, or use the environment that has it: environment.venv or .conda",
        retry="never",
        source="docs.python.org: exceptions",
    ),
    Rule(
        id="import-name",
        cause="a package's version is not the one that this code expects",
        patterns=(
            r"cannot import name '(?P<name>[^']+)'",
            r"AttributeError: module '(?P<module>[^']+)' has no attribute '(?P<name2>[^']+)'",
            r"(?:requires|is required) .*version .* but found|VersionConflict|but found \w+==",
            r"^ImportError: .*(?:requires|required) .*",
        ),
        fix="install the versions that the script was written for; a file of your own may also hide the package",
        retry="never",
        certain=False,
        source="docs.python.org: exceptions",
    ),
    Rule(
        id="credentials",
        cause="a service refused the credentials, or was given none",
        patterns=(
            r"(?:401|403) (?:Client Error|Forbidden|Unauthorized)|GatedRepoError|gated repo",
            r"Invalid (?:user token|credentials|API key)|api_key not configured|No API key configured",
            r"(?:must be|is not) (?:authenticated|logged in)|AuthenticationError|UsageError: .*wandb login",
            r"Access to model \S+ is restricted|Token is required|PermissionError\(.*wandb",
            r"CommError.*(?:permission|denied|401|403)",
        ),
        fix="export HF_TOKEN or WANDB_API_KEY before you start the job (--env names it on PBS), and accept the model's "
        "terms on its page",
        retry="after a change",
        certain=False,
        source="huggingface_hub; wandb",
    ),
    Rule(
        id="certificate",
        cause="a server's certificate is not trusted",
        patterns=(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLCertVerificationError",),
        fix="set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the site's certificates",
        retry="after a change",
        source="docs.python.org: ssl",
    ),
    Rule(
        id="hub-unreachable",
        cause="the node does not reach a server on the internet",
        patterns=(
            r"couldn't connect to '?https?://|We couldn't connect to|Couldn't reach",
            r"Max retries exceeded with url|LocalEntryNotFoundError|OfflineModeIsEnabled",
            r"ProxyError|urlopen error|(?:Read|Connect)Timeout(?:Error)?\b.*(?:huggingface|https?)",
            r"Could not resolve host: |Failed to connect to \S+ port 443",
            r"wandb.*(?:[Nn]etwork error|timed out)|CommError",
        ),
        fix="download before the job, on the login node, and set HF_HUB_OFFLINE=1 or WANDB_MODE=offline",
        retry="after a change",
        certain=False,
        source="huggingface_hub; urllib3",
    ),
)
