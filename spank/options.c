#include "options.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define VALUE_MAX 1024
#define YEAR_S (366 * 86400L) /* as in slurm_resil.core.units */

enum { RESIL, PREFIX, EVERY, INTERVAL, LEAD, RUN_ID, REDUNDANCY, OPTIONS };

struct resil_option {
	const char *variable;
	int (*valid)(const char *value);
	const char *example;
	int given;
	char value[VALUE_MAX];
};

static int valid_switch(const char *value)
{
	return !strcmp(value, "on") || !strcmp(value, "off");
}

static int valid_path(const char *value)
{
	return value[0] == '/';
}

static int valid_count(const char *value)
{
	size_t digits = strspn(value, "0123456789");

	return digits > 0 && digits < 12 && !value[digits] && strspn(value, "0") < digits;
}

static int valid_duration(const char *value)
{
	static const char *const units[] = { "s", "min", "m", "h", "d", NULL };
	static const long seconds[] = { 1, 60, 60, 3600, 86400 };
	size_t digits = strspn(value, "0123456789");

	if (digits == 0 || digits > 9 || strspn(value, "0") == digits)
		return 0;
	for (size_t i = 0; units[i]; i++)
		if (!strcmp(value + digits, units[i]))
			return strtol(value, NULL, 10) <= YEAR_S / seconds[i];
	return 0;
}

static int valid_name(const char *value)
{
	if (!value[0] || value[0] == '.')
		return 0;
	for (const char *c = value; *c; c++)
		if (!isalnum((unsigned char)*c) && !strchr("._-", *c))
			return 0;
	return 1;
}

/* A number of at most `most` digits, from 1 to `limit`; returns what follows, NULL if there is none. */
static const char *after_number(const char *at, size_t most, long limit)
{
	size_t digits = strspn(at, "0123456789");

	if (digits == 0 || digits > most || strspn(at, "0") == digits || strtol(at, NULL, 10) > limit)
		return NULL;
	return at + digits;
}

/* An entry of a list of schemes as core.protection reads it: xor, rs:2/10, drain every 20; returns what follows. */
static const char *after_entry(const char *at)
{
	static const char *const names[] = { "auto", "single", "xor", "drain", "partner", "rs", NULL };
	enum { AUTO, SINGLE, XOR, DRAIN, PARTNER, RS };
	size_t length = 0;
	int kind;

	at += strspn(at, " ");
	for (kind = 0; names[kind]; kind++) {
		length = strlen(names[kind]);
		if (!strncasecmp(at, names[kind], length) && !isalpha((unsigned char)at[length]))
			break;
	}
	if (!names[kind])
		return NULL;
	at += length;
	if (*at == ':' && (kind < PARTNER || !(at = after_number(at + 1, 9, 16))))
		return NULL;
	length = strspn(at, " ");
	if (kind != AUTO && at[length] == '/')
		at = after_number(at + length + 1 + strspn(at + length + 1, " "), 9, 1000000);
	else if (kind != AUTO && length && !strncasecmp(at + length, "every ", 6))
		at = after_number(at + length + 6 + strspn(at + length + 6, " "), 9, 1000000);
	return at ? at + strspn(at, " ") : NULL;
}

/* Each entry for itself; whether they go together is said by `slurm-resil run`. */
static int valid_redundancy(const char *value)
{
	while ((value = after_entry(value)) && *value == ',')
		value++;
	return value && !*value;
}

static struct resil_option options[OPTIONS] = {
	[RESIL] = { "SLURM_RESIL", valid_switch, "--resil or --resil=off", 0, "" },
	[PREFIX] = { "SLURM_RESIL_PREFIX", valid_path, "--resil-prefix=/scratch/me/runs", 0, "" },
	[EVERY] = { "SLURM_RESIL_EVERY", valid_count, "--resil-every=500", 0, "" },
	[INTERVAL] = { "SLURM_RESIL_INTERVAL", valid_duration, "--resil-interval=10min", 0, "" },
	[LEAD] = { "SLURM_RESIL_LEAD", valid_duration, "--resil-lead=90s", 0, "" },
	[RUN_ID] = { "SLURM_RESIL_RUN_ID", valid_name, "--resil-run-id=llama-3", 0, "" },
	[REDUNDANCY] = { "SLURM_RESIL_REDUNDANCY", valid_redundancy, "--resil-redundancy=xor,rs:2/10", 0, "" },
};

/* Slurm may call this more than once for one option: the last call counts. */
static int take(int index, const char *value, int remote)
{
	struct resil_option *option;
	int length;

	(void)remote;
	if (index < 0 || index >= OPTIONS)
		return -1;
	option = &options[index];
	if (!value || !value[0] || !strcmp(value, "(null)"))
		value = index == RESIL ? "on" : "";
	if (!option->valid(value)) {
		char shown[200];

		/* whoever wrote it must not write lines of the log */
		snprintf(shown, sizeof(shown), "%s", value);
		for (char *at = shown; *at; at++)
			if (!isprint((unsigned char)*at))
				*at = '?';
		slurm_error("slurm_resil: %s is not valid here, write it as in %s", shown, option->example);
		return -1;
	}
	length = snprintf(option->value, sizeof(option->value), "%s", value);
	if (length < 0 || (size_t)length >= sizeof(option->value)) {
		slurm_error("slurm_resil: a value of %d characters is too long", length);
		return -1;
	}
	option->given = 1;
	return 0;
}

/* The names and texts are not const in Slurm's own declaration of the structure. */
static struct spank_option table[] = {
	{ (char *)"resil", (char *)"[on|off]", (char *)"keep the training job alive (slurm_resil)", 2, RESIL, take },
	{ (char *)"resil-prefix", (char *)"PATH", (char *)"directory of the runs on the parallel file system", 1, PREFIX,
	  take },
	{ (char *)"resil-every", (char *)"N", (char *)"checkpoint every N iterations", 1, EVERY, take },
	{ (char *)"resil-interval", (char *)"DURATION", (char *)"checkpoint every so often", 1, INTERVAL, take },
	{ (char *)"resil-lead", (char *)"DURATION", (char *)"time to save before a deadline", 1, LEAD, take },
	{ (char *)"resil-run-id", (char *)"NAME", (char *)"name of the run over all its requeues", 1, RUN_ID, take },
	{ (char *)"resil-redundancy", (char *)"SCHEMES", (char *)"how nodes protect each other's checkpoints", 1,
	  REDUNDANCY, take },
	SPANK_OPTIONS_TABLE_END
};

int resil_options_register(spank_t sp)
{
	for (size_t i = 0; table[i].name; i++)
		if (spank_option_register(sp, &table[i]) != ESPANK_SUCCESS) {
			slurm_error("slurm_resil: the option --%s cannot be registered", table[i].name);
			return -1;
		}
	return 0;
}

int resil_options_on(void)
{
	if (options[RESIL].given)
		return !strcmp(options[RESIL].value, "on");
	for (size_t i = 0; i < OPTIONS; i++)
		if (options[i].given)
			return 1;
	return 0;
}

int resil_options_each(int (*put)(spank_t sp, const char *name, const char *value), spank_t sp)
{
	if (!resil_options_on()) {
		/* switched off in words: what the environment brings along does not count either */
		for (size_t i = 0; options[RESIL].given && i < OPTIONS; i++)
			if (put(sp, options[i].variable, NULL))
				return -1;
		return 0;
	}
	if (put(sp, options[RESIL].variable, "1"))
		return -1;
	for (size_t i = RESIL + 1; i < OPTIONS; i++)
		if (options[i].given && put(sp, options[i].variable, options[i].value))
			return -1;
	return 0;
}
