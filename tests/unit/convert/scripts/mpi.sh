#!/bin/bash
mpirun -np 8 -H gpu1:4,gpu2:4 -x NCCL_DEBUG=INFO -x PATH /opt/env/bin/python -u train.py
