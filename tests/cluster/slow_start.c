/* A step with SLOW_START in its environment takes so many seconds to start, as on a node that is busy. */
#include <slurm/spank.h>
#include <stdlib.h>
#include <unistd.h>

SPANK_PLUGIN(slow_start, 1)

/* In slurmstepd: the tasks are there, and wait for this before they are executed. */
int slurm_spank_task_post_fork(spank_t sp, int ac, char **av)
{
	char text[16];

	(void)ac;
	(void)av;
	if (spank_getenv(sp, "SLOW_START", text, sizeof(text)) == ESPANK_SUCCESS)
		usleep((useconds_t)(strtod(text, NULL) * 1e6));
	return 0;
}
