#!/bin/bash

# Parameters
#SBATCH --account=mybudget
#SBATCH --cpus-per-task=72
#SBATCH --error=<runs>/.submitit/JOB/%j_0_log.err
#SBATCH --gres=gpu:4
#SBATCH --job-name=europa_1t-8a65706961e0
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --nodes=96
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=<runs>/.submitit/JOB/%j_0_log.out
#SBATCH --partition=booster
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=720

# setup
# A job's shell knows the command only if the submitting shell exports it.
type module >/dev/null 2>&1 || . /etc/profile
module load Stages/2026 || { echo "cluster.modules: failed to load Stages/2026 on $(uname -n)" >&2; exit 1; }
module load GCC || { echo "cluster.modules: failed to load GCC on $(uname -n)" >&2; exit 1; }
module load Python || { echo "cluster.modules: failed to load Python on $(uname -n)" >&2; exit 1; }
module load CUDA || { echo "cluster.modules: failed to load CUDA on $(uname -n)" >&2; exit 1; }
module load NCCL || { echo "cluster.modules: failed to load NCCL on $(uname -n)" >&2; exit 1; }
export SRUN_CPUS_PER_TASK=72  # srun doesn't inherit it
# A signal waits until the ranks can take it. Where env is too old for that (coreutils < 8.31), it is not heeded.
begin=(env --block-signal=USR2,TERM)
"${begin[@]}" true 2>/dev/null || begin=(bash -c 'trap "" USR2; exec "$@"' bash)
export PYTHONSAFEPATH=1
export PYTHONPATH=<code>"${PYTHONPATH:+:$PYTHONPATH}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --label --kill-on-bad-exit=1 "${begin[@]}" bash <code>/europa_exp/launch/numa_bind.sh cpu_and_memory go_on <python> -u -m europa_exp.launch.slurm_start <runs>/.submitit/JOB

