#!/bin/bash
cd $PBS_O_WORKDIR
source ~/venvs/vit/bin/activate
torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$PBS_NODENUM \
    --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py --model vit_l --batch-size 64
