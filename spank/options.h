/* Options of the plugin: what they are called, what is valid, what they become in the job's environment. */
#ifndef RESIL_OPTIONS_H
#define RESIL_OPTIONS_H

#include <slurm/spank.h>

/* Register all options with Slurm. */
int resil_options_register(spank_t sp);

/* 1 if --resil, or any option that implies it, was given and not switched off. */
int resil_options_on(void);

/* Call `put` with name and value of every variable that the options given stand for, value NULL for one that must not
 * be there; stops at the first failure. */
int resil_options_each(int (*put)(spank_t sp, const char *name, const char *value), spank_t sp);

#endif
