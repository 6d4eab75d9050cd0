#!/usr/bin/env python3
"""The line that every raw log begins with: what was measured, when, and on what. It is one JSON object.

rawlog.py [KEY=VALUE...] prints it. KEY=VALUE adds a field or replaces one, as gpu=simulated.

    commit      of the programs measured, as git describe prints it; -dirty if the tree differed from it
    date        when the measurement began, UTC
    processor, cores, kernel
    gpu         name and memory, with the number of them if there are several; none without a GPU
    driver      its version
    pytorch     its version and that of its CUDA, if PYTHON has it

A value that nobody knows is "unknown". A log of which the commit is unknown has "added": the commit that brought it
into the tree, and so is not older than the programs measured. One whose commit was rebased before it landed has "landed":
what it became. A log may be several logs one after the other, each with
its header.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ("commit", "date", "processor", "cores", "kernel", "gpu", "driver")


def said(*command):
    """What a command prints, without its last newline; nothing if it fails or hangs."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, cwd=ROOT, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit():
    """Of the programs in the build folder, which may be older than the tree; else of the tree."""
    build = Path(os.environ.get("SLUICE_BUILD") or ROOT / "build")
    words = said(build / "bin" / "sluice", "version").replace(",", " ").split()
    if words[:2] == ["sluice", "version"]:
        return words[2]
    if (build / "version").exists():
        return (build / "version").read_text().strip()
    return said("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"


def gpu():
    """(name and memory, driver) by nvidia-smi."""
    rows = [r.rsplit(", ", 1) for r in said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()]
    kinds = Counter(r[0] for r in rows if len(r) == 2)
    if not kinds:
        return "none", "none"
    return "; ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items()), rows[0][1]


def header(**more):
    name, driver = ("", "") if "gpu" in more and "driver" in more else gpu()
    fields = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "gpu": name,
        "driver": driver,
    }
    torch = said(os.environ.get("PYTHON") or sys.executable, "-c", "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)")
    if torch:
        fields["pytorch"] = torch
    return {**fields, **more}


def parse(line):
    """The header that the line is, or None."""
    if not line.startswith('{"commit"'):
        return None
    try:
        fields = json.loads(line)
    except ValueError:  # cut off in the middle
        return None
    return fields if all(k in fields for k in FIELDS) else None


def headers(path):
    """All headers of a log, the first line's first; none if the log does not begin with one."""
    with open(path, encoding="utf-8", errors="replace") as f:
        found = [parse(line) for line in f if line.startswith('{"commit"')]
        f.seek(0)
        return [h for h in found if h] if parse(f.readline()) else []


def sections(path):
    """(header, the objects below it) for each header of a log of JSON lines. A line that was cut off in the middle is
    left out. Without a header all of it is one section, of None."""
    header, objects = None, []
    with open(path, encoding="utf-8") as f:
        for line in f:
            if h := parse(line):
                if header or objects:
                    yield header, objects
                header, objects = h, []
                continue
            try:
                objects.append(json.loads(line))
            except ValueError:
                continue
    yield header, objects


def read(path):
    """All objects of a log of JSON lines."""
    return [o for _, objects in sections(path) for o in objects]


def text(h):
    """A header as a page shows it, in lines."""
    of = h["commit"] if h["commit"] != "unknown" else f"unknown, not later than {h['added']}" if "added" in h else "unknown"
    yield f"commit {of}; date {h['date']}"
    yield f"{h['processor']}, {h['cores']} cores, {h['kernel']}"
    yield f"{h['gpu']}, driver {h['driver']}" + (f", PyTorch {h['pytorch']}" if "pytorch" in h else "")
    if "note" in h:
        yield h["note"]


if __name__ == "__main__":
    print(json.dumps(header(**dict(a.split("=", 1) for a in sys.argv[1:]))))
