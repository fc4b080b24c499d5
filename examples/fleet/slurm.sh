#!/bin/bash
#SBATCH --array=1-4 --exclusive --requeue
# sbatch slurm.sh: every task takes a fourth of the cells; a task that is started again goes on where it was.
# Run by measurements/fleet/engines.py on a Slurm of two nodes.
mrb sweep seed-grid~scaled --out "parts/$SLURM_ARRAY_TASK_ID" --shard auto
# when all have ended: mrb results merge parts/* --out results
