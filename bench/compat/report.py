#!/usr/bin/env python3
"""What gpu-compat.sh found: which cases pass natively and not remotely, and the page docs/compatibility.md.

report.py --differences DIR   prints a table and the cases that differ; exit status 1 if there are any
report.py --page DIR          prints the page, from the same files
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
}
WORST = {"fail": 2, "skip": 1, "pass": 0}


def load(path):
    cases = {}
    with open(path) as f:
        for line in f:
            c = json.loads(line)
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
        if r is None or r["result"] == "skip" and "time left" in r.get("why", ""):
            absent.append(k)
            continue
        passed.setdefault(k[0], []).append(k)
        if r["result"] != "pass":
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


def main():
    what, folder = sys.argv[1], sys.argv[2]
    passed, differ, absent = compare(folder)
    if what == "--differences":
        print("\n".join(table(passed, differ)))
        for (suite, case), result, why in differ:
            print("%s %s %s: %s" % (result, suite, case, why))
        if absent:
            print("%d cases that pass natively have no result remotely: %s" % (len(absent), ", ".join("%s %s" % k for k in absent[:10])))
        sys.exit(1 if differ or absent else 0)
    with open(os.path.join(folder, "header.json")) as f:
        header = json.loads(f.readline())
    print("# What runs through Sluice\n")
    print("Other people's tests and programs, chosen by the hash of their names, on one machine natively and through a worker over TCP.")
    print("Made by `bench/compat/report.py --page` from the raw log in `bench/logs/compat`; `bench/gpu-compat.sh` makes that.\n")
    print("\n".join("- %s: %s" % (k, v) for k, v in header.items()))
    print()
    print("\n".join(table(passed, differ)))
    print("\n## What differs, and why\n\n| suite | case | what is seen |\n|---|---|---|")
    for (suite, case), result, why in differ:
        print("| %s | %s | %s: %s |" % (suite, case, result, why.replace("|", "/")[:200]))
    for suite, case in absent:
        print("| %s | %s | no result: its process ended before |" % (suite, case))


main()
