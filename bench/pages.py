#!/usr/bin/env python3
"""Keeps the figures of README.md, CHANGELOG.md and docs/ equal to the raw logs.

pages.py            lists what differs, exit status 1 if anything does; then warns of logs older than the code they measured
pages.py --check    without the warnings
pages.py --write    puts into the pages what the logs say
pages.py --old      the warnings alone

A figure that was measured stands in a block:

    <!-- made by bench/report.py gpu bench/logs/h200/bench.jsonl -->
    what that command prints
    <!-- end -->

Every raw log begins with the line that rawlog.py prints. Outside of blocks a page has no times, rates and ratios but those in constants.txt: limits, defaults and lengths that are
decided and not measured. A log is old if remoting/client, remoting/worker or remoting/wire changed since its commit by
more than comments and tests. That needs the history; where git does not have it, as in a shallow clone, a line says so.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import rawlog

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("remoting/client", "remoting/worker", "remoting/wire")
BLOCK = re.compile(r"(<!-- made by (bench/\S+(?: \S+)*) -->\n)(.*?)(<!-- end -->\n)", re.S)
# A time, a rate, a ratio of two decimals or more: 0.5 ms, 18 to 20 us, 110 MB/s, 0.99.
FIGURE = re.compile(r"(?<![\w.,/-])(?:\d[\d,]*(?:\.\d+)? ?(?:ns|us|µs|ms|s|[MGk]B/s|[a-z]+/s)(?![\w/])|0\.\d\d+(?![\w.]))")
COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|`[^`]*`|'(?:\\.|[^'\\\n])*'""", re.S)


def pages():
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def name(path):
    return str(path.relative_to(ROOT))


def made(command):
    done = subprocess.run([sys.executable, *command.split()], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return done.stdout


def rewrite(text):
    """The page with what the logs say in its blocks."""
    return BLOCK.sub(lambda b: b[1] + made(b[2]) + b[4], text)


def typed(text):
    """(line number, figure) for each figure outside of blocks and code."""
    blank = lambda m: "\n" * m[0].count("\n")
    text = BLOCK.sub(blank, text)
    text = re.sub(r"^```.*?^```$", blank, text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.M))
    for number, line in enumerate(text.splitlines(), 1):
        for m in FIGURE.finditer(line):
            yield number, m[0]


def constants():
    """{page: figures that it may have without a log}"""
    known = {}
    for line in (ROOT / "bench/constants.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            page, _, figures = line.partition(": ")
            known.setdefault(page, set()).update(figures.split(", "))
    return known


def logs():
    """All raw logs: what lies in bench/logs, and the logs of tests in test, as units.log.bookworm."""
    measured = (p for p in (ROOT / "bench/logs").rglob("*") if p.is_file())
    return [*sorted(measured), *sorted(p for p in (ROOT / "test").rglob("*") if p.is_file() and ".log" in p.suffixes)]


def check():
    bad, known = 0, constants()
    for path in pages():
        text = path.read_text()
        want = rewrite(text)
        if want != text:
            bad += 1
            sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), want.splitlines(True), name(path), "what the raw logs say", n=0))
            print(f"pages: {name(path)} differs from its raw logs; run bench/pages.py --write")
        left = set(known.pop(name(path), ()))
        allowed = set(left)
        for number, figure in typed(text):
            left.discard(figure)
            if figure not in allowed:
                bad += 1
                print(f"pages: {name(path)}:{number}: {figure} is in no block that a raw log makes; if it was decided and not measured, add it to bench/constants.txt")
        for figure in sorted(left):
            bad += 1
            print(f"pages: bench/constants.txt: {name(path)} no longer has {figure}")
    for page in known:
        bad += 1
        print(f"pages: bench/constants.txt: there is no {page}")
    for log in logs():
        if not rawlog.headers(log):
            bad += 1
            print(f"pages: {name(log)} does not begin with the line that bench/rawlog.py prints")
    return bad == 0


def git(*args):
    done = subprocess.run(["git", *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else None


def code(path, text):
    """A source file without its comments, in words. Directives and what cgo compiles are no comments."""
    kept, cgo, rest = text.rpartition('\nimport "C"') if path.endswith(".go") else ("", "", text)
    rest = COMMENT.sub(lambda m: m[0] if m[0][0] in "\"'`" or m[0].startswith(("//go:", "//export ")) else " ", rest)
    return (kept + cgo + rest).split()


def changed(commit):
    """Files of what was measured that differ from the commit by more than comments; None if git does not have it."""
    if git("cat-file", "-e", commit + "^{commit}") is None:
        return None
    found = []
    for path in (git("diff", "--name-only", "--no-renames", commit, "--", *MEASURED) or "").splitlines():
        base = path.rpartition("/")[2]
        if not base.endswith((".go", ".c", ".h")) or base.endswith("_test.go") or base.startswith("test") or "/testdata/" in path:
            continue
        before = git("show", f"{commit}:{path}") or ""
        now = (ROOT / path).read_text(errors="replace") if (ROOT / path).exists() else ""
        if code(path, before) != code(path, now):
            found.append(path)
    return found


def old():
    """Prints a warning for each log that is older than what it measured."""
    logs = {}
    for path in pages():
        for b in BLOCK.finditer(path.read_text()):
            for word in b[2].split():
                if word.startswith("bench/logs/"):
                    logs.setdefault(word, set()).add(name(path))
    for log, users in sorted(logs.items()):
        for commit, how in sorted({of(h) for h in rawlog.headers(ROOT / log)}):
            files = changed(commit) if commit else None
            if files == []:
                continue
            print(f"pages: warning: {', '.join(sorted(users))}: {log} is of {how}")
            if commit and files is None:
                print("    git does not have that commit here, so nobody can tell what has changed since")
            elif files:
                print(f"    {len(files)} files of what it measured have changed since:")
                folders = {}
                for f in files:
                    folder, _, base = f.rpartition("/")
                    folders.setdefault(folder, []).append(base)
                for folder, bases in folders.items():
                    print(f"      {folder}: {', '.join(bases)}")


def of(h):
    """(a commit that is not older than what was measured, how the warning says it)"""
    if h["commit"] != "unknown":
        return h["commit"].removesuffix("-dirty"), h["commit"]
    if "added" in h:
        return h["added"], f"an unknown commit, not later than {h['added']}"
    return "", "an unknown commit"


def main():
    if sys.argv[1:] == ["--write"]:
        for path in pages():
            path.write_text(rewrite(path.read_text()))
        return
    good = sys.argv[1:] == ["--old"] or check()
    if sys.argv[1:] != ["--check"]:
        old()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
