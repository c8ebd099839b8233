#!/bin/bash
#$ -N sge-train
#$ -cwd -V -j y
#$ -pe smp 16
#$ -l h_rt=10:00:00,gpu=2,h_vmem=4G
#$ -q gpu.q
source /apps/setup.sh
torchrun --standalone --nproc_per_node=2 train.py --data /data
