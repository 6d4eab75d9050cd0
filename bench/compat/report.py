#!/usr/bin/env python3
"""What gpu-compat.sh found: which cases pass natively and not remotely, and the page docs/compatibility.md.

report.py --differences DIR   prints a table and the cases that differ; exit status 1 if there are any
report.py --page FILE...      prints the page's figures from the native.jsonl of one or more runs, and the remote.jsonl beside
                              each; the last that has a suite counts
"""

import json
import os
import sys

SUITES = {
    "samples": "NVIDIA's CUDA samples that need no display",
    "programs": "small programs, each one thing that users do (`bench/compat/programs.py`)",
    "torch": "PyTorch's operators with its own sample inputs, against the processor (`bench/compat/test_torch.py`)",
    "cupy": "CuPy's own tests",
    "numba": "numba-cuda's own tests",
    "jax": "JAX's own tests",
    "cudacore": "cuda-python's own tests of cuda.core",
    "cudabindings": "cuda-python's own tests of cuda.bindings",
    "libraries": "the samples of NVIDIA's libraries (cuBLAS, cuBLASLt, cuFFT, cuRAND, cuSOLVER, cuSPARSE)",
    "benchmarks": "HeCBench's programs",
}
WORST = {"fail": 2, "skip": 1, "pass": 0}


def load(path):
    cases = {}
    with open(path) as f:
        for line in f:
            c = json.loads(line)
            if "case" not in c:
                continue  # the header
            k = (c["suite"], c["case"])
            if k not in cases or WORST[c["result"]] >= WORST[cases[k]["result"]]:
                cases[k] = c
    return cases


def compare(folder):
    """The cases that pass natively, by suite, and those of them that fail remotely, with why."""
    native, remote = load(folder + "/native.jsonl"), load(folder + "/remote.jsonl")
    passed, differ, absent = {}, [], []
    for k, n in native.items():
        if n["result"] != "pass":
            continue
        r = remote.get(k)
        if r is not None and r["result"] == "skip" and "time left" in r.get("why", ""):
            absent.append(k)
            continue
        passed.setdefault(k[0], []).append(k)
        if r is None:
            differ.append((k, "absent", "the suite leaves the case out there"))
        elif r["result"] != "pass":
            differ.append((k, r["result"], r.get("why", "it was skipped")))
        elif n.get("digest") != r.get("digest"):
            differ.append((k, "wrong", "its answer is another one"))
    return passed, sorted(differ), absent


def table(passed, differ):
    lines = ["| suite | pass natively | of them remotely | |", "|---|---|---|---|"]
    every = bad = 0
    for s in SUITES:
        if s not in passed:
            continue
        n, d = len(passed[s]), sum(1 for k, _, _ in differ if k[0] == s)
        every, bad = every + n, bad + d
        lines.append("| %s | %d | %d | %.1f %% |" % (SUITES[s], n, n - d, 100 * (n - d) / n))
    if every:
        lines.append("| all | %d | %d | %.2f %% |" % (every, every - bad, 100 * (every - bad) / every))
    return lines


def page(files):
    runs, counts, passed, differ, absent = [], {}, {}, [], []
    for file in files:
        folder = os.path.dirname(file)
        p, d, a = compare(folder)
        for suite in p:
            differ = [x for x in differ if x[0][0] != suite]
            absent = [x for x in absent if x[0] != suite]
        passed.update(p)
        counts.update((suite, file) for suite in p)
        differ += d
        absent += a
        with open(file) as f:
            header = json.loads(f.readline())
        runs.append((file, "commit %s, %s, driver %s, %s" % (header["commit"], header["gpu"], header["driver"], header["date"][:10])))
    print("\n".join(table(passed, differ)))
    print("\nMeasured:\n")
    for file, what in runs:
        print("- %s: %s" % (", ".join(sorted(s for s in counts if counts[s] == file)), what))
    print("\n## What differed\n\n| suite | case | what was seen |\n|---|---|---|")
    for (suite, case), result, why in sorted(differ):
        print("| %s | `%s` | %s: %s |" % (suite, case.replace("|", "/"), result, " ".join(why.replace("|", "/").split())[:160]))
    for suite, case in absent:
        print("| %s | `%s` | no result: the time was up |" % (suite, case.replace("|", "/")))


def main():
    if sys.argv[1] == "--page":
        page(sys.argv[2:])
        return
    folder = sys.argv[2]
    passed, differ, absent = compare(folder)
    print("\n".join(table(passed, differ)))
    for (suite, case), result, why in differ:
        print("%s %s %s: %s" % (result, suite, case, why))
    if absent:
        print("%d cases that pass natively have no result remotely: %s" % (len(absent), ", ".join("%s %s" % k for k in absent[:10])))
    sys.exit(1 if differ or absent else 0)


main()
