#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
export WANDB_PROJECT=llm
export PDSH_RCMD_TYPE=ssh
deepspeed --hostfile=hostfile --master_port 29500 \
    train.py --model 7b --deepspeed ds_config.json 2>&1 | tee train.log
