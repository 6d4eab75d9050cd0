/* Linked statically: prints the files that its arguments name, for images without a loader. */
#include <stdio.h>

int main(int argc, char **argv)
{
	char line[256];

	for (int i = 1; i < argc; i++) {
		FILE *f = fopen(argv[i], "r");

		printf("%s: %s\n", argv[i], f && fgets(line, sizeof line, f) ? line : "none");
		if (f)
			fclose(f);
	}
	return 0;
}
