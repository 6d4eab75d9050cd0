/* MD2 by RFC 1319's own vectors, and the integrity answer by three known ones. */
#include "integrity.h"
#include "test.h"

static void md2(const char *text, const char *want)
{
	uint8_t out[16];

	sl_md2(text, strlen(text), out);
	CHECK(!strcmp(hex(out, 16), want), "MD2(\"%s\") is %s", text, hex(out, 16));
}

static void answer(const struct sl_integrity *in, const struct sl_integrity_device *dev, unsigned n, const char *want)
{
	uint8_t out[16];

	sl_integrity_answer(in, dev, n, out);
	CHECK(!strcmp(hex(out, 16), want), "answer is %s, want %s", hex(out, 16), want);
}

int main(void)
{
	struct sl_integrity in = { 12080, 12082, 0x2fa423, 0xf79c1000, 0x7ffff6958240, 0x7ffff6958220, 0x7ffff2aaf4a0, 0x682b9cee };
	struct sl_integrity_device one = { { 0x9a, 0xfe, 0x2b, 0x8a, 0xac, 0x25, 0x2d, 0x38, 0xea, 0x37, 0xae, 0xc5, 0x6d, 0x71, 0x32, 0x5f },
					   0, 2, 0 };
	struct sl_integrity_device two[2] = { { .bus = 1 }, { .bus = 0x81 } };

	md2("", "8350e5a3e24c153df2275c9f80692773");
	md2("a", "32ec01ec4a6dac72c0ab96fb34c0b5d1");
	md2("abc", "da853b0d3f88d99b30283a69e6ded6bb");
	md2("message digest", "ab4f496bfb2a530b219ff33031fe06b0");
	md2("12345678901234567890123456789012345678901234567890123456789012345678901234567890", "d5976f79d83d3a0dc9806c3c66f3efd8");

	answer(&in, &one, 1, "4448a171b026cef76c8c3e39051b02dd");
	in = (struct sl_integrity){ 13000, 13002, 4242, 0x12345740, 0x7f0000001000, 0x7f0000002000, 0x7f0000003000, 1700000000 };
	answer(&in, NULL, 0, "1940fa598768c64808a597a795803308");
	for (int i = 0; i < 16; i++) {
		two[0].uuid[i] = (uint8_t)i;
		two[1].uuid[i] = (uint8_t)(16 + i);
	}
	answer(&in, two, 2, "1e1dc25dce7e56d2acbf12f19f78a81a");
	in.version = 13000;
	answer(&in, two, 2, "5c67cb031c184133e8d14c1faa83d38e");
	in.version = 13001;
	answer(&in, two, 2, "5c67cb031c184118e8d14c1faa83d38e");
	printf("test_integrity: ok\n");
	return 0;
}
