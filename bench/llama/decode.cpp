// Times a model with llama.cpp's library: one prompt and greedy decoding from a cold start, then each of them repeated.
//
//     decode MODEL [--prompt 512] [--new 128] [--repeats 5] [--layers 99] [--threads 4]
//
// Prints one JSON line. Rates are tokens a second; first_ms is from the start of main to the first token, so it has the
// loading of the model in it. digest is over the bits of all logits of the cold run, tokens over its tokens.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using steady = std::chrono::steady_clock;

static double seconds(steady::time_point from)
{
	return std::chrono::duration<double>(steady::now() - from).count();
}

// FNV-1a.
static void add(uint64_t &digest, const void *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		digest = (digest ^ static_cast<const unsigned char *>(p)[i]) * 1099511628211u;
}

[[noreturn]] static void die(const char *what)
{
	fprintf(stderr, "decode: %s\n", what);
	exit(1);
}

struct engine {
	llama_context *context;
	int vocabulary;

	// The most likely token after these; it waits for the GPU.
	llama_token next(llama_token *tokens, int n, uint64_t *digest)
	{
		if (llama_decode(context, llama_batch_get_one(tokens, n)))
			die("llama_decode fails");
		const float *logits = llama_get_logits_ith(context, -1);
		if (digest)
			add(*digest, logits, vocabulary * sizeof *logits);
		return static_cast<llama_token>(std::max_element(logits, logits + vocabulary) - logits);
	}

	void forget() { llama_memory_clear(llama_get_memory(context), true); }
};

static double median(std::vector<double> v)
{
	std::sort(v.begin(), v.end());
	return v[v.size() / 2];
}

static void quiet(ggml_log_level level, const char *text, void *)
{
	if (level >= GGML_LOG_LEVEL_WARN || getenv("DECODE_VERBOSE"))
		fputs(text, stderr);
}

int main(int argc, char **argv)
{
	steady::time_point begun = steady::now();
	int prompt = 512, fresh = 128, repeats = 5, layers = 99, threads = 4;

	if (argc < 2 || argc % 2)
		die("usage: decode MODEL [--prompt N] [--new N] [--repeats N] [--layers N] [--threads N]");
	for (int i = 2; i + 1 < argc; i += 2) {
		int *to = !strcmp(argv[i], "--prompt") ? &prompt : !strcmp(argv[i], "--new") ? &fresh :
			  !strcmp(argv[i], "--repeats") ? &repeats : !strcmp(argv[i], "--layers") ? &layers :
			  !strcmp(argv[i], "--threads") ? &threads : nullptr;
		if (!to)
			die("unknown flag");
		*to = atoi(argv[i + 1]);
	}
	llama_log_set(quiet, nullptr);
	ggml_backend_load_all();
	llama_model_params mp = llama_model_default_params();
	mp.n_gpu_layers = layers;
	mp.progress_callback = [](float, void *) { return true; }; // no dots
	llama_model *model = llama_model_load_from_file(argv[1], mp);
	if (!model)
		die("the model does not load");
	double loaded = seconds(begun);
	llama_context_params cp = llama_context_default_params();
	cp.n_ctx = static_cast<uint32_t>(prompt + fresh + 64);
	cp.n_batch = cp.n_ubatch = static_cast<uint32_t>(std::max(prompt, 32));
	cp.n_threads = cp.n_threads_batch = threads;
	llama_context *context = llama_init_from_model(model, cp);
	if (!context)
		die("no context");
	engine e = {context, llama_vocab_n_tokens(llama_model_get_vocab(model))};
	std::vector<llama_token> words;
	for (int i = 0; i < prompt; i++)
		words.push_back((i * 7 + 3) % e.vocabulary);

	// Cold: the prompt, and token by token after it.
	uint64_t digest = 14695981039346656037u, tokens = digest;
	steady::time_point cold = steady::now();
	llama_token t = e.next(words.data(), prompt, &digest);
	double first = seconds(begun);
	std::vector<double> gaps;
	for (int i = 0; i < fresh; i++) {
		steady::time_point at = steady::now();
		add(tokens, &t, sizeof t);
		t = e.next(&t, 1, &digest);
		gaps.push_back(1e3 * seconds(at));
	}
	double cold_rate = (fresh + 1) / seconds(cold);

	// Known: the prompt alone, and the decoding alone, from an empty memory.
	std::vector<double> prompts, decodes, known;
	for (int r = 0; r < repeats; r++) {
		e.forget();
		steady::time_point at = steady::now();
		e.next(words.data(), prompt, nullptr);
		prompts.push_back(prompt / seconds(at));
		e.forget();
		at = steady::now();
		for (int i = 0; i < fresh; i++) {
			steady::time_point one = steady::now();
			t = e.next(&words[static_cast<size_t>(i) % words.size()], 1, nullptr);
			known.push_back(1e3 * seconds(one));
		}
		decodes.push_back(fresh / seconds(at));
	}
	std::sort(known.begin(), known.end());
	std::sort(gaps.begin(), gaps.end());
	printf("{\"bench\": \"llama\", \"prompt\": %d, \"new\": %d, \"load_ms\": %.1f, \"first_ms\": %.1f, \"cold_tokens_s\": %.2f, "
	       "\"cold_p99_ms\": %.3f, \"prompt_tokens_s\": %.1f, \"tokens_s\": %.2f, \"tokens_s_min\": %.2f, \"tokens_s_max\": %.2f, "
	       "\"p50_ms\": %.3f, \"p99_ms\": %.3f, \"tokens\": \"%016llx\", \"digest\": \"%016llx\"}\n",
	       prompt, fresh, 1e3 * loaded, 1e3 * first, cold_rate, gaps[gaps.size() * 99 / 100], median(prompts), median(decodes),
	       *std::min_element(decodes.begin(), decodes.end()), *std::max_element(decodes.begin(), decodes.end()),
	       known[known.size() / 2], known[known.size() * 99 / 100], static_cast<unsigned long long>(tokens),
	       static_cast<unsigned long long>(digest));
	llama_free(context);
	llama_model_free(model);
	return 0;
}
