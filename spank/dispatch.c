/* What Slurm calls: each function only chooses the file for the context. See plugin.h. */
#include "plugin.h"
#include "version.h"

static struct sl_settings settings;

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	spank_context_t where = spank_context();

	/* An administrator's mistake goes to slurmd's log, not to each user's terminal. */
	sl_settings_read(&settings, ac, av, where == S_CTX_SLURMD ? slurm_error : slurm_verbose);
	if (where == S_CTX_LOCAL || where == S_CTX_ALLOCATOR || where == S_CTX_REMOTE)
		sl_option_register(sp);
	return 0;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return sl_local_init_post_opt(sp);
	case S_CTX_ALLOCATOR:
		return sl_allocator_init_post_opt(sp);
	default:
		return 0;
	}
}

int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	return spank_context() == S_CTX_REMOTE ? sl_remote_user_init(sp, &settings) : 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	return spank_context() == S_CTX_REMOTE ? sl_remote_task_init(sp) : 0;
}
