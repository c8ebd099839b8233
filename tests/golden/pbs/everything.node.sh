#!/usr/bin/env bash
# Started by the supervisor of run RUN: sets a node up and becomes its agent, which starts the ranks and watches them.
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO, on $HOSTNAME)" >&2' ERR
trap '' USR1; trap '(($? == 0)) || sleep 0.5' EXIT  # The warning is for ranks. Let a last line be read.
cd -- /project

# environment.modules
for file in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do
  type module >/dev/null 2>&1 || [ ! -r "$file" ] || . "$file" || true
done
type module >/dev/null 2>&1 || {
  echo 'allranks: environment.modules: there is no command "module" here, and no file that defines it in $LMOD_PKG/init, $MODULESHOME/init or /etc/profile.d; environment.setup can define it' >&2
  builtin exit 1
}
module load cuda/12.4

# environment.conda
command -v "${CONDA_EXE:-conda}" >/dev/null || {
  echo 'allranks: environment.conda: there is no conda here: neither $CONDA_EXE nor a command "conda" on PATH; environment.modules or .setup can bring it' >&2
  builtin exit 1
}
eval "$("${CONDA_EXE:-conda}" shell.bash hook)"
conda activate 'my env'

# environment.node_setup
cat >/tmp/config <<EOF
  key: "$USER"
EOF

export GLOO_SOCKET_IFNAME=ib0  # launch.interface
export NCCL_SOCKET_IFNAME=ib0  # launch.interface
export NCCL_DEBUG=INFO  # debug is on
export TORCH_DISTRIBUTED_DEBUG=DETAIL  # debug is on
export TORCH_CPP_LOG_LEVEL=INFO  # debug is on
export TORCH_SHOW_CPP_STACKTRACES=1  # debug is on
export PYTHONFAULTHANDLER=1  # debug is on
export NCCL_IB_TIMEOUT=22  # environment.variables
export ALLRANKS_BACKEND=nccl PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
trap - EXIT; exec apptainer exec --nv 'my image.sif' python "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
