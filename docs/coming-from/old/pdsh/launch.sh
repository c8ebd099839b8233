#!/bin/bash
pdsh -R ssh -w worker-[1-2] "cd $HOME/project; source venv/bin/activate; \
    torchrun --nnodes=2 --nproc_per_node=4 --node_rank=%n \
        --master_addr=worker-1 --master_port=29500 train.py --model 7b" | tee train.log
