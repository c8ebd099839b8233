#!/bin/bash
# usage: ./launch.sh        hosts.txt has one machine on each line
NNODES=$(wc -l < hosts.txt)
MASTER=$(head -n 1 hosts.txt)
WORKDIR=$HOME/project
RANK=0
while read HOST; do
    ssh $HOST "pkill -9 -f train.py"
    ssh $HOST "cd $WORKDIR; source venv/bin/activate; \
        export NCCL_SOCKET_IFNAME=eth0; \
        nohup torchrun --nnodes=$NNODES --nproc_per_node=8 --node_rank=$RANK \
            --master_addr=$MASTER --master_port=29500 train.py --lr 3e-4 > log.$RANK 2>&1 &"
    RANK=$((RANK + 1))
done < hosts.txt
echo "started on $NNODES machines"
