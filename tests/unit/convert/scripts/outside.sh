#!/bin/bash
# usage: outside.sh RUN
RUN=$1
STAMP=$(date +%s)
OUT=$SCRATCH/runs
mkdir -p $OUT
torchrun --nproc_per_node=$GPUS train.py --run $RUN --out "$OUT/$STAMP" --data ${DATA:-/data} "$@"
