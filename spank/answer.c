/*
 * The daemon's answer: one line; after "ok N" follow N bytes of changes, one a line.
 *
 *	none                 the job asked for nothing
 *	error TEXT           the job must not run
 *	fault TEXT           the daemon does not know
 *	ok N                 then: set NAME=VALUE
 *	                           prepend NAME=VALUE    a list with colons
 *	                           bind NAME=VALUE       a list with commas
 *
 * The daemon runs as root, yet its answer is not trusted: one that is not exactly of
 * this form is refused whole. Nothing here does I/O.
 */
#include "plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void broken(struct sl_answer *a, enum sl_kind kind, const char *why)
{
	a->kind = kind;
	snprintf(a->text, sizeof a->text, "sluiced's answer is malformed: %s; plug-in and sluiced must be of the same release", why);
}

/* Copies the text of a line, which goes to the user's terminal. */
static void tell(struct sl_answer *a, enum sl_kind kind, const char *text)
{
	a->kind = kind;
	snprintf(a->text, sizeof a->text, "%s", text);
	for (char *c = a->text; *c; c++)
		if ((unsigned char)*c < ' ' || *c == 127)
			*c = '?';
}

static bool good_name(const char *s, size_t n)
{
	if (!n || n > 128 || (s[0] >= '0' && s[0] <= '9'))
		return false;
	for (size_t i = 0; i < n; i++) {
		char c = s[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'))
			return false;
	}
	return true;
}

/* Splits one line "VERB NAME=VALUE\n" in place. Returns its end, or NULL if it has another form. */
static char *change(char *line, size_t n, struct sl_change *c)
{
	static const struct {
		const char *verb;
		char separator;
	} verbs[] = { { "set ", 0 }, { "prepend ", ':' }, { "bind ", ',' } };
	char *end = memchr(line, '\n', n), *name = NULL, *eq;

	if (!end)
		return NULL;
	*end = 0;
	for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
		size_t len = strlen(verbs[i].verb);

		if (strncmp(line, verbs[i].verb, len))
			continue;
		name = line + len;
		c->separator = verbs[i].separator;
	}
	if (!name || !(eq = strchr(name, '=')) || !good_name(name, (size_t)(eq - name)))
		return NULL;
	*eq = 0;
	c->name = name;
	c->value = eq + 1;
	return end + 1;
}

bool sl_answer_next(struct sl_answer *a, struct sl_change *c)
{
	char *next;

	if (a->kind != SL_ENV || !a->len)
		return false;
	next = change(a->body, a->len, c);
	if (!next) {
		broken(a, SL_ERROR, "it has a bad change of the environment");
		return false;
	}
	a->len -= (size_t)(next - a->body);
	a->body = next;
	return true;
}

void sl_answer_read(struct sl_answer *a, char *buf, size_t n)
{
	char *end = n ? memchr(buf, '\n', n) : NULL, ok[32];
	size_t rest;

	memset(a, 0, sizeof *a);
	if (!end || memchr(buf, 0, n)) {
		broken(a, SL_SILENT, "it is not a line of text");
		return;
	}
	*end = 0;
	rest = n - (size_t)(end - buf) - 1;
	snprintf(ok, sizeof ok, "ok %zu", rest);
	if (!strcmp(buf, "none") && !rest) {
		a->kind = SL_NONE;
	} else if (!strncmp(buf, "error ", 6) && !rest) {
		tell(a, SL_ERROR, buf + 6);
	} else if (!strncmp(buf, "fault ", 6) && !rest) {
		tell(a, SL_SILENT, buf + 6);
	} else if (!strcmp(buf, ok) && rest <= SL_BODY_MAX) {
		a->kind = SL_ENV;
		a->body = end + 1;
		a->len = rest;
	} else {
		broken(a, SL_SILENT, "it is of an unknown kind, or not as long as it says");
	}
}

char *sl_list_change(const char *item, const char *list, char separator, bool add)
{
	const char separators[] = { separator, 0 };
	size_t n = strlen(item);
	char *out = malloc(n + strlen(list) + 2), *p = out;
	bool any = add;

	if (!out)
		return NULL;
	if (add)
		p = stpcpy(p, item);
	for (bool more = *list; more;) {
		size_t len = strcspn(list, separators);

		more = list[len];
		if (len != n || memcmp(list, item, n)) {
			if (any)
				*p++ = separator;
			any = true;
			p = mempcpy(p, list, len);
		}
		list += len + more;
	}
	*p = 0;
	return out;
}
