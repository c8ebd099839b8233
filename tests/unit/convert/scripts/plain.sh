#!/usr/bin/env bash
set -e
cd "$(dirname "$0")"
export CUDA_VISIBLE_DEVICES=0,1
export TOKENIZERS_PARALLELISM=false
ulimit -n 65536
LR=0.1
ARGS="--lr $LR --epochs 3"
nohup torchrun --standalone --nproc_per_node=2 train.py $ARGS --note 'two words' > train.log 2>&1 &
