#!/bin/bash

# Parameters
#SBATCH --array=0-3%2
#SBATCH --error=<runs>/.submitit/JOB/%A_%a_0_log.err
#SBATCH --hold
#SBATCH --job-name=comm_max_ctas
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=<runs>/.submitit/JOB/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=60

# setup
# A signal waits until the ranks can take it. Where env is too old for that (coreutils < 8.31), it is not heeded.
begin=(env --block-signal=USR2,TERM)
"${begin[@]}" true 2>/dev/null || begin=(bash -c 'trap "" USR2; exec "$@"' bash)
export PYTHONSAFEPATH=1
export PYTHONPATH=<code>"${PYTHONPATH:+:$PYTHONPATH}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --label --kill-on-bad-exit=1 "${begin[@]}" <python> -u -m europa_exp.launch.slurm_start <runs>/.submitit/JOB

