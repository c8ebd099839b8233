module purge
module load cuda/12.4 nccl/2.21
source ~/.bashrc
conda activate pretrain
export OMP_NUM_THREADS=8
export NCCL_DEBUG=INFO
export NCCL_SOCKET_IFNAME=ib0
export WANDB_API_KEY=1234567890abcdef1234567890abcdef12345678
export DATA=/scratch/data/c4
