#!/bin/bash
for seed in 1 2 3; do
  torchrun --standalone --nproc-per-node=4 train.py --seed $seed
done
