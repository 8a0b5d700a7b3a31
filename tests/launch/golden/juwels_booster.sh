#!/bin/bash

# Parameters
#SBATCH --account=mybudget
#SBATCH --cpus-per-task=12
#SBATCH --error=<runs>/.submitit/JOB/%j_0_log.err
#SBATCH --gres=gpu:4
#SBATCH --job-name=nodes=1-gpus_per_node=4-threads_per_rank=4-0c61bb0e8bb3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=<runs>/.submitit/JOB/%j_0_log.out
#SBATCH --partition=booster
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=60

# setup
# A job's shell knows the command only if the submitting shell exports it.
type module >/dev/null 2>&1 || . /etc/profile
module load Stages/2025 || { echo "cluster.modules: failed to load Stages/2025 on $(uname -n)" >&2; exit 1; }
module load GCC || { echo "cluster.modules: failed to load GCC on $(uname -n)" >&2; exit 1; }
module load Python || { echo "cluster.modules: failed to load Python on $(uname -n)" >&2; exit 1; }
module load CUDA || { echo "cluster.modules: failed to load CUDA on $(uname -n)" >&2; exit 1; }
module load NCCL || { echo "cluster.modules: failed to load NCCL on $(uname -n)" >&2; exit 1; }
export SRUN_CPUS_PER_TASK=12  # srun doesn't inherit it
# A signal waits until the ranks can take it. Where env is too old for that (coreutils < 8.31), it is not heeded.
begin=(env --block-signal=USR2,TERM)
"${begin[@]}" true 2>/dev/null || begin=(bash -c 'trap "" USR2; exec "$@"' bash)
export PYTHONSAFEPATH=1
export PYTHONPATH=<code>"${PYTHONPATH:+:$PYTHONPATH}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --label --kill-on-bad-exit=1 "${begin[@]}" <python> -u -m europa_exp.launch.slurm_start <runs>/.submitit/JOB

