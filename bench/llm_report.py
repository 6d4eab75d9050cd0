"""Lines for a terminal of the raw log of gpu-llm.sh: each figure natively, remotely, and the share of native speed.

llm_report.py LOG
llm_report.py --page LOG [PART...]    the tables of docs/benchmarks.md, of all parts or of these

A run's name is PART.VARIANT.NUMBER. Of several native runs of a number the median counts; a remote run's result must be
the same as natively where it is a digest.
"""

import statistics
import sys
from pathlib import Path

import rawlog
from report import LINKS

# Key of a figure, what it is, and whether more of it is faster; a path of keys is written with a dot.
FIGURES = {
    "tokens": [
        ("cold.tokens_s", "tokens/s, cold", True),
        ("cold_total_tokens_s", "tokens/s from the first call of CUDA on, cold", True),
        ("cuda_and_weights_ms", "first call of CUDA and copying the weights, ms", False),
        ("cold.first_ms", "time to first token, ms", False),
        ("cold.p99_ms", "p99 between tokens, cold, ms", False),
        ("known.tokens_s", "tokens/s, lengths known", True),
        ("known.p99_ms", "p99 between tokens, lengths known, ms", False),
    ],
    "attention": [
        ("new_first_ms", "first shape, ms", False),
        ("new_median_ms", "a new shape, ms", False),
        ("known_median_ms", "a known shape, ms", False),
    ],
    "llama": [
        ("load_ms", "loading the model, ms", False),
        ("first_ms", "start to first token, ms", False),
        ("cold_tokens_s", "tokens/s, cold", True),
        ("prompt_tokens_s", "prompt, tokens/s", True),
        ("tokens_s", "decoding, tokens/s", True),
        ("p50_ms", "p50 between tokens, ms", False),
        ("p99_ms", "p99 between tokens, ms", False),
    ],
}
SAME = {"tokens": ("tokens",), "attention": ("sums",), "llama": ("tokens", "digest")}


def figure(result, key):
    for k in key.split("."):
        result = result[k]
    return result


def load(log):
    """{part: {number: {variant: [line]}}}"""
    found = {}
    for line in rawlog.read(log):
        part, variant, number = line["run"].split(".")
        found.setdefault(part, {}).setdefault(number, {}).setdefault(variant, []).append(line)
    return found


def lines(part, number, variants, native):
    for v in LINKS:
        for run in variants.get(v, [])[-1:]:
            waits = sum(s["waits"] for s in run["stats"])
            same = all(run["result"][k] == n["result"][k] for k in SAME[part] for n in native)
            yield f"{part} {number}, {LINKS[v]}: {'the same' if same else 'DIFFERENT'} results; {waits} waits"
            for key, title, more in FIGURES[part]:
                base = statistics.median(figure(n["result"], key) for n in native)
                got = figure(run["result"], key)
                share = got / base if more else base / got
                yield f"    {title:48} native {base:10.2f}  remote {got:10.2f}  {share:.3f} of native speed"


PARTS = {
    "llama": ("llama.cpp", {"cold": "worker's store empty", "1": "second session"}),
    "tokens": ("Greedy decoding in PyTorch", {"empty": "compile cache empty", "filled": "filled"}),
    "attention": ("cuDNN's attention", {"empty": "compile cache empty", "filled": "filled"}),
}


def page(log, parts):
    """A table for each part, of those named if any are: natively, and over each link with the share of native speed."""
    head = rawlog.headers(log)[0]
    yield f"{head['gpu']}, driver {head['driver']}, commit {head['commit']}, {head['date'][:10]}."
    for part, numbers in load(log).items():
        if parts and part not in parts:
            continue
        every = [n for variants in numbers.values() for n in variants.get("native", [])]
        links = [v for v in LINKS if any(v in variants for variants in numbers.values())]
        title, names = PARTS[part]
        yield ""
        yield f"| {title} | | native | " + " | ".join(LINKS[v] for v in links) + " |"
        yield "|---" * (3 + len(links)) + "|"
        for number, variants in sorted(numbers.items(), key=lambda n: list(names).index(n[0])):
            native = variants.get("native") or every
            if not any(v in variants for v in links):
                continue
            for key, what, more in FIGURES[part]:
                base = statistics.median(figure(n["result"], key) for n in native)
                row = [names[number], what, f"{base:.2f}"]
                for v in links:
                    got = figure(variants[v][-1]["result"], key)
                    row.append(f"{got:.2f} ({got / base if more else base / got:.2f})")
                yield "| " + " | ".join(row) + " |"


def main():
    if sys.argv[1] == "--page":
        print(*page(Path(sys.argv[2]), sys.argv[3:]), sep="\n")
        return
    for part, numbers in load(Path(sys.argv[1])).items():
        every = [n for variants in numbers.values() for n in variants.get("native", [])]
        for number, variants in numbers.items():
            native = variants.get("native") or every
            if native:
                print(*lines(part, number, variants, native), sep="\n")


if __name__ == "__main__":
    main()
