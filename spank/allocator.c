/* sbatch and salloc, on the machine where a job is submitted, as the user. */
#include "plugin.h"

int sl_allocator_init_post_opt(spank_t sp)
{
	return sl_option_send(sp);
}
