#!/usr/bin/env python3
"""sizes.py: product files of Go and C have at most 700 lines, and their functions at most 80.

What is longer today stands in sizes.txt with the most it may have. That list only shrinks: nothing is added to it, no
number in it grows, and what has come below its limit is taken out. sizes.py --write lowers the numbers to what they are
and takes out what may go; it adds nothing.

Not counted: tests, what a generator writes, and the CUDA driver's declarations (cuabi.h, cuprotos.h).
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "test/sizes.txt"
FILE, FUNCTION = 700, 80
PRODUCT = ("daemon", "internal", "remoting", "spank", "oci-hook")
FACTS = ("remoting/api/cuabi.h", "remoting/api/cuprotos.h")


def sources():
    """(path, lines) of each product file."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(f"{d}/*" for d in PRODUCT)],
                           cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    for name in sorted(set(names)):
        base = name.rpartition("/")[2]
        if not base.endswith((".go", ".c", ".h")) or name in FACTS or not (ROOT / name).exists():
            continue
        if base.endswith("_test.go") or base.startswith("test") or "/test/" in name or "/testdata/" in name:
            continue
        lines = (ROOT / name).read_text().splitlines()
        if not any(re.search(r"Code generated .* DO NOT EDIT", line) for line in lines[:20]):
            yield name, lines


def functions(name, lines):
    """(function, its lines). gofmt and the style of our C put a function's closing brace, and no other, alone into the
    first column, and C's opening brace too."""
    begin, called = None, ""
    for i, line in enumerate(lines):
        if name.endswith(".go"):
            m = re.match(r"func (?:\([^)]*?(\w+)(?:\[[^]]*\])?\) )?(\w+)", line)
            if m and not line.endswith("}"):
                begin, called = i, ".".join(p for p in m.groups() if p)
        elif line == "{":
            begin = i - 1
            while begin > 0 and lines[begin - 1] and lines[begin - 1][0] not in "}#/ *":  # a declaration of several lines
                begin -= 1
            m = re.search(r"(\w+)\(", " ".join(lines[begin:i]))
            called = m[1] if m else "?"
        if line == "}" and begin is not None:
            yield called, i - begin + 1
            begin = None


def measured():
    """{what: lines} of all that is too long: a file's name, or file:function."""
    found = {}
    for name, lines in sources():
        if len(lines) > FILE:
            found[name] = len(lines)
        for function, n in functions(name, lines):
            if n > FUNCTION:
                found[f"{name}:{function}"] = max(n, found.get(f"{name}:{function}", 0))
    return found


def main():
    allowed = {}
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            what, _, n = line.rpartition(" ")
            allowed[what] = int(n)
    found = measured()
    if sys.argv[1:] == ["--write"]:
        head = [line for line in LIST.read_text().splitlines() if line.startswith("#")]
        rows = [f"{what} {min(n, found[what])}" for what, n in allowed.items() if what in found]
        LIST.write_text("\n".join([*head, *rows]) + "\n")
        return
    bad = 0
    for what, n in sorted(found.items()):
        limit = allowed.get(what, FUNCTION if ":" in what else FILE)
        if n > limit:
            bad += 1
            print(f"sizes: {what} has {n} lines, more than {limit}: split it", file=sys.stderr)
    for what in sorted(set(allowed) - set(found)):
        bad += 1
        print(f"sizes: {what} is within the limit now: take it out of test/sizes.txt (test/sizes.py --write)", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
