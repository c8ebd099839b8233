#!/usr/bin/env bash
# allranks VERSION: run RUN: what runs on each of 2 nodes
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR
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

# environment.venv
[ -r /project/.venv/bin/activate ] || {
  echo 'allranks: environment.venv: there is no virtual environment at /project/.venv; make it there, or correct environment.venv' >&2
  builtin exit 1
}
. /project/.venv/bin/activate

# environment.node_setup
ulimit -n 65536

export NCCL_IB_TIMEOUT=22  # environment.variables
export ALLRANKS_BACKEND=gloo PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
# secrets: they come with the environment, their values are written nowhere
: "${WANDB_API_KEY?set it before you start this script by hand}"
exec apptainer exec --nv 'my image.sif' python "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
