#!/usr/bin/env python3
"""report.py LOG: judges the log of gpu-leftovers.sh. Exit status 1 if a reader found marks of another user, or did not look.
report.py --page LOG: its table, for docs/threat-model.md.

A control is one process that looks for what it has itself written and freed: marks that it finds show that marks are
found where they are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rawlog

KINDS = ("device", "pool", "managed", "vmm", "array", "host", "shared", "local")
WRITERS = {
    "control": "the same process, which freed the memory",
    "exit": "a program that ended by itself",
    "cap": "a program whose last allocation was refused",
    "kill": "a program that was killed",
    "session": "a program whose session process was killed while a kernel ran",
}
WHERE = {"remote": "by leases", "native": "without Sluice"}


def read(log):
    """{run: {"found": {memory: line}, "error": why it is not there, if so}}, in their order"""
    runs = {}
    for line in rawlog.read(log):
        r = runs.setdefault(line["run"], {"found": {}})
        if "memory" in line:
            r["found"][line["memory"]] = line
        if line.get("status"):
            r["error"] = f"the reader ended with {line['status']}"
        if "error" in line:
            r["error"] = line["error"]
    return runs


def title(run):
    where, end = run.split(".")
    return f"{WRITERS[end]}, {WHERE[where]}"


def size(n):
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def cell(line):
    return f"{size(8 * line['marks'])} of {size(line['bytes'])}" if line and line["marks"] else f"none in {size(line['bytes'])}" if line else ""


def page(log):
    head, runs = rawlog.headers(log)[0], read(log)
    yield f"{head['gpu']}, driver {head['driver']}, commit {head['commit']}, {head['date'][:10]}."
    yield ""
    yield "| marks written by | " + " | ".join(KINDS) + " |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for run, r in runs.items():
        yield f"| {title(run)} | " + " | ".join(cell(r["found"].get(k)) for k in KINDS) + f" |{' ' + r['error'] if 'error' in r else ''}"


def judged(log):
    """(run, whether it is as it should be, what to say of it)"""
    for run, r in read(log).items():
        marks = sum(line["marks"] for line in r["found"].values())
        text = "; ".join(f"{k} {cell(r['found'].get(k))}" for k in KINDS if k in r["found"])
        if "error" in r:
            yield run, False, r["error"]
        elif run.endswith(".control"):
            yield run, bool(r["found"]), text
        else:
            yield run, marks == 0 and all(r["found"].get(k, {}).get("bytes") for k in KINDS), text


def main():
    if sys.argv[1:2] == ["--page"]:
        print(*page(sys.argv[2]), sep="\n")
        return
    found = list(judged(sys.argv[1]))
    for run, good, text in found:
        print(f"{'PASS' if good else 'FAIL'} {run:16} {text}")
    sys.exit(0 if found and all(good for _, good, _ in found) else 1)


if __name__ == "__main__":
    main()
