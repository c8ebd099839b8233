#!/bin/bash
pdsh -R ssh -w node[01-04] "cd project; export NCCL_IB_HCA=mlx5; source /opt/env/bin/activate; torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=node01:29500 train.py"
