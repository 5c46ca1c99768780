/*
 * SPANK plugin of slurm_resil: switches on the context, nothing else.
 *
 * It starts nothing, waits for nothing and runs no interpreter: options become environment, agents are started by
 * `slurm-resil run` as a step. Install it as `optional`: a build for another release of Slurm must break no command.
 */
#include <slurm/spank.h>

#include "options.h"
#include "remote.h"
#include "submit.h"

SPANK_PLUGIN(slurm_resil, 1)

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
	case S_CTX_REMOTE:
		return resil_options_register(sp);
	default:
		return 0;
	}
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
		return resil_submit_post_opt(sp);
	case S_CTX_REMOTE:
		return resil_remote_post_opt(sp);
	default:
		return 0;
	}
}
