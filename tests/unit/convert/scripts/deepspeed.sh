#!/bin/bash
# Pretraining on the four machines in the corner.
deepspeed --hostfile=hosts.txt --num_gpus 8 --master_port 29501 pretrain.py --deepspeed --deepspeed_config ds.json
