/*
 * What a worker of another release knows: the same, less, more, other forms, and lists that are
 * none.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "forms.h"
#include "test.h"
#include "wire.h"

static struct wire_form list[4096];
static unsigned n;

/* As this library's own worker would send it. */
static void own(void)
{
	n = sl_nforms;
	for (unsigned i = 0; i < n; i++)
		list[i] = (struct wire_form){ .id = sl_forms[i].id, .sum = sl_forms[i].sum };
}

static uint8_t *compared(size_t bytes, unsigned *lacking, const char **differs)
{
	/* As large as the message, so that the sanitizer sees a byte read behind it. */
	uint8_t *p = malloc(bytes ? bytes : 1), *lacks;

	memcpy(p, list, bytes);
	lacks = sl_forms_compare(p, bytes, lacking, differs);
	free(p);
	return lacks;
}

static unsigned find(const char *name)
{
	for (unsigned i = 0; i < sl_nforms; i++)
		if (!strcmp(sl_forms[i].name, name))
			return i;
	fprintf(stderr, "there is no form of %s\n", name);
	exit(1);
}

int main(void)
{
	unsigned lacking, alloc = find("cuMemAlloc_v2"), launch = find("launch"), hello = find("message HELLO");
	const char *differs;
	uint8_t *lacks;

	for (unsigned i = 1; i < sl_nforms; i++)
		CHECK(sl_forms[i - 1].id < sl_forms[i].id);

	own();
	lacks = compared(n * sizeof *list, &lacking, &differs);
	CHECK(lacks && !lacking && !sl_forms_lack(lacks, sl_forms[alloc].op) && !sl_forms_lack(lacks, CTL_LAUNCH));
	CHECK(sl_forms_lack(lacks, SL_NO_OP) && sl_forms_lack(lacks, SL_OP_CONTROL + SL_NCONTROLS)); /* beyond the table */
	free(lacks);

	/* Another form of one call, no form of another, and a call that the shim does not know. */
	own();
	list[alloc].sum ^= 1;
	memmove(list + launch, list + launch + 1, (n - launch - 1) * sizeof *list);
	list[n - 1] = (struct wire_form){ .id = ~0u, .sum = 1 };
	lacks = compared(n * sizeof *list, &lacking, &differs);
	CHECK(lacks && lacking == 2 && sl_forms_lack(lacks, sl_forms[alloc].op) && sl_forms_lack(lacks, CTL_LAUNCH));
	CHECK(!sl_forms_lack(lacks, CTL_CTX_ACTIVATE) && !sl_forms_lack(lacks, sl_forms[find("cuMemFree_v2")].op));
	free(lacks);

	/* A message that every session needs. */
	own();
	list[hello].sum ^= 1;
	CHECK(!compared(n * sizeof *list, &lacking, &differs) && differs && !strcmp(differs, "message HELLO"));

	/* Every length, and a list in no order: more is lacking, nothing is read that is not there. */
	own();
	for (size_t bytes = 0; bytes < 3 * sizeof *list; bytes++) {
		lacks = compared(bytes, &lacking, &differs);
		CHECK(!lacks == (bytes % sizeof *list != 0));
		free(lacks);
	}
	own();
	for (unsigned i = 0; i < n / 2; i++) {
		struct wire_form f = list[i];

		list[i] = list[n - 1 - i];
		list[n - 1 - i] = f;
	}
	lacks = compared(n * sizeof *list, &lacking, &differs);
	CHECK(lacks && lacking > 0);
	free(lacks);
	printf("test_forms: ok\n");
	return 0;
}
