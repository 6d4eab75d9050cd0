/* FIPS 180-4's examples, and both implementations against each other on odd lengths. */
#include "sha256.h"
#include "test.h"

static const char *digest(const void *p, size_t n, bool portable, size_t step)
{
	struct sl_sha256 s;
	uint8_t out[32];

	sl_sha256_init(&s);
	s.portable = portable;
	for (size_t at = 0; at < n; at += step)
		sl_sha256_add(&s, (const char *)p + at, n - at < step ? n - at : step);
	sl_sha256_end(&s, out);
	return hex(out, 32);
}

int main(void)
{
	static uint8_t data[5000];
	uint64_t seed = 1;
	char a[65];

	for (int portable = 0; portable < 2; portable++) {
		CHECK(!strcmp(digest("abc", 3, portable, 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
		CHECK(!strcmp(digest("", 0, portable, 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
		CHECK(!strcmp(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, portable, 7),
			      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
	}
	for (size_t i = 0; i < sizeof data; i++)
		data[i] = (uint8_t)next_random(&seed);
	for (size_t n = 0; n < sizeof data; n += 1 + next_random(&seed) % 97) {
		strcpy(a, digest(data, n, true, 1 + next_random(&seed) % 200));
		CHECK(!strcmp(a, digest(data, n, false, 1 + next_random(&seed) % 200)), "length %zu", n);
	}
	printf("test_sha256: ok\n");
	return 0;
}
