/*
 * What the C programs share that use the driver's interface alone and need no header of NVIDIA's: its functions are looked up at run
 * time. A program defines PROGRAM, its name in messages, before it includes this.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int err, const char *what)
{
	if (err) {
		fprintf(stderr, PROGRAM ": %s: error %d\n", what, err);
		exit(1);
	}
}

#define CHECK(call) check(call, #call)

/* Makes the file that BEGUN names, if it does: the program is in the middle of what it is for. */
static inline void begun(void)
{
	const char *name = getenv("BEGUN");
	FILE *f = name ? fopen(name, "w") : NULL;

	if (f)
		fclose(f);
}

struct function {
	void *to;	/* a pointer to a function */
	const char *name;
};

static void load(const struct function *all, size_t n)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);

	if (!lib) {
		fprintf(stderr, PROGRAM ": %s\n", dlerror());
		exit(1);
	}
	for (size_t i = 0; i < n; i++) {
		void *f = dlsym(lib, all[i].name);

		if (!f) {
			fprintf(stderr, PROGRAM ": no %s\n", all[i].name);
			exit(1);
		}
		memcpy(all[i].to, &f, sizeof f);
	}
}
