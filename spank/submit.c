#include "submit.h"
#include "options.h"

/* Arrives in prolog and epilog as SPANK_<name>. */
static int put(spank_t sp, const char *name, const char *value)
{
	if (!value)
		return 0; /* only what is put there arrives there */
	if (spank_job_control_setenv(sp, name, value, 1) != ESPANK_SUCCESS) {
		slurm_error("slurm_resil: %s cannot be passed to the job's hooks", name);
		return -1;
	}
	return 0;
}

int resil_submit_post_opt(spank_t sp)
{
	return resil_options_each(put, sp);
}
