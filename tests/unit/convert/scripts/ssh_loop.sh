#!/bin/bash
HOSTS=(gpu1 gpu2 ada@gpu3)
export NCCL_DEBUG=INFO
for i in "${!HOSTS[@]}"; do
  ssh -n ${HOSTS[$i]} "cd project && source /opt/venv/bin/activate && ulimit -l unlimited && torchrun --nnodes=3 --nproc_per_node=4 --node_rank=$i --master_addr=gpu1 --master_port=29500 train.py --lr 0.2" &
done
wait
