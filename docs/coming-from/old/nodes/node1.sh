#!/bin/bash
# on gpu02, in tmux
source venv/bin/activate
export NCCL_SOCKET_IFNAME=eth0
torchrun --nnodes=2 --nproc_per_node=8 --node_rank=1 --master_addr=gpu01 --master_port=29500 train.py --lr 3e-4
