/* Context of sbatch, salloc and srun. */
#ifndef RESIL_SUBMIT_H
#define RESIL_SUBMIT_H

#include <slurm/spank.h>

int resil_submit_post_opt(spank_t sp);

#endif
