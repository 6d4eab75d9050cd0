/* profiler: starts and stops a profiler that is not there, as torch.cuda.profiler does, and asks for a table of CUPTI's as that does. */
#include "driver.h"

#include <string.h>

typedef CUresult profiler_call(void);

int main()
{
	static const unsigned char cupti[16] = { 0x7c, 0xb6, 0x3f, 0x9b, 0x9c, 0xa4, 0x8e, 0x42, 0xa4, 0x84, 0xbe, 0xb6, 0x6e, 0x6a, 0xed, 0x7f };
	CUuuid id;
	const void *table;

	memcpy(&id, cupti, sizeof id);
	CHECK(cudaFree(0));
	for (int i = 0; i < 2; i++) {
		DRIVER(driver("cuProfilerStart", (profiler_call *)NULL)());
		DRIVER(driver("cuProfilerStop", (profiler_call *)NULL)());
		CU(cuGetExportTable)(&table, &id); /* natively it is there */
	}
	printf("profiler: started and stopped\n");
	return pass();
}
