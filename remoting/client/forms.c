/* See forms.h. Nothing is shared, and there is no lock. */
#include "forms.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

/* The place of an operation's bit. */
static size_t place(uint16_t op)
{
	return op < SL_OP_CONTROL ? op : sl_nops + (size_t)(op - SL_OP_CONTROL);
}

uint8_t *sl_forms_compare(const uint8_t *data, size_t n, unsigned *lacking, const char **differs)
{
	size_t left = n / sizeof(struct wire_form);
	uint8_t *lacks;

	*lacking = 0;
	*differs = "the list of what it knows";
	if (n % sizeof(struct wire_form))
		return NULL;
	lacks = calloc((sl_nops + SL_NCONTROLS + 7u) / 8, 1);
	*differs = NULL;
	/* Both lists are in the order of their ids; one that is not is of a worker that lacks more. */
	for (unsigned i = 0; lacks && i < sl_nforms; i++) {
		const struct sl_form *own = &sl_forms[i];
		struct wire_form f = { 0 };

		for (; left; left--, data += sizeof f) {
			memcpy(&f, data, sizeof f);
			if (f.id >= own->id)
				break;
		}
		if (left && f.id == own->id && f.sum == own->sum)
			continue;
		if (own->op != SL_NO_OP) {
			lacks[place(own->op) / 8] |= (uint8_t)(1u << place(own->op) % 8);
			++*lacking;
		} else if (left && f.id == own->id) {
			*differs = own->name;
			free(lacks);
			lacks = NULL;
		}
	}
	return lacks;
}

bool sl_forms_lack(const uint8_t *lacks, uint16_t op)
{
	size_t at = place(op);

	return at >= sl_nops + SL_NCONTROLS || lacks[at / 8] >> at % 8 & 1;
}
