/*
 * What a worker of another release knows: the forms of operations and messages, which both
 * sides' tables make. See docs/protocol.md, "Releases beside each other".
 */
#ifndef SLUICE_FORMS_H
#define SLUICE_FORMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SL_NO_OP 0xffffu /* of a form that is no operation's: no operation has that number */

struct sl_form {
	uint32_t id, sum;
	uint16_t op;
	const char *name;
};

/* What this library knows, in the order of the ids (gen_forms.c). */
extern const struct sl_form sl_forms[];
extern const unsigned sl_nforms;
/* How many numbers the functions of the API table have. */
extern const unsigned sl_nops;

/*
 * Compares with what a worker has sent, n bytes of FORMs. Returns what it lacks, for sl_forms_lack and to be freed, and how
 * many operations that are. NULL: the two cannot speak with each other, and *differs says in what; or, with *differs
 * NULL, there is no memory.
 */
uint8_t *sl_forms_compare(const uint8_t *data, size_t n, unsigned *lacking, const char **differs);

/* Whether an operation is among those that the worker lacks. */
bool sl_forms_lack(const uint8_t *lacks, uint16_t op);

#endif
