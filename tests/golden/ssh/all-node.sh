#!/usr/bin/env bash
# allranks VERSION: run RUN: what runs on each of 2 nodes
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR

# the ranks' working directory
cd -- /project

# environment.modules
for file in ${LMOD_PKG:+"$LMOD_PKG/init/bash"} ${MODULESHOME:+"$MODULESHOME/init/bash"} \
    /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do
  type module >/dev/null 2>&1 && break
  [ ! -r "$file" ] || . "$file" || true
done
if ! type module >/dev/null 2>&1; then
  echo 'allranks: environment.modules: there is no command "module" here, and no file that defines it in $LMOD_PKG/init, $MODULESHOME/init or /etc/profile.d; environment.setup can define it' >&2
  exit 1
fi
module load cuda/12.4

# environment.venv
. /project/.venv/bin/activate

# environment.node_setup
ulimit -n 65536

# environment.variables
export NCCL_IB_TIMEOUT=22
# the backend that allranks.init() takes
export ALLRANKS_BACKEND=gloo
# `import allranks` in the ranks finds the run's own copy
export PYTHONPATH="$ALLRANKS_RUN_DIR/code""${PYTHONPATH:+:$PYTHONPATH}"

# secrets: they come with the environment, their values are written nowhere
: "${WANDB_API_KEY?set it before you start this script by hand}"

# the agent takes the place of this shell: it starts the ranks and watches them
exec apptainer exec --nv 'my image.sif' python "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
