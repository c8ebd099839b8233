#!/bin/bash
rank=0
while read -r host; do
  ssh "$host" "torchrun --nnodes=4 --nproc_per_node=8 --node_rank=$rank --master_addr=10.0.0.1 train.py" &
  rank=$((rank + 1))
done < hosts.txt
wait
