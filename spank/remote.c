#include "remote.h"
#include "options.h"

/* What the user has put into the environment by hand is replaced: the option is closer to the job. */
static int put(spank_t sp, const char *name, const char *value)
{
	if (!value) {
		spank_unsetenv(sp, name);
		return 0;
	}
	if (spank_setenv(sp, name, value, 1) != ESPANK_SUCCESS) {
		slurm_error("slurm_resil: %s cannot be put into the environment", name);
		return -1;
	}
	return 0;
}

int resil_remote_post_opt(spank_t sp)
{
	return resil_options_each(put, sp);
}
