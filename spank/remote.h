/* Context of slurmstepd: the batch script and every task. */
#ifndef RESIL_REMOTE_H
#define RESIL_REMOTE_H

#include <slurm/spank.h>

int resil_remote_post_opt(spank_t sp);

#endif
