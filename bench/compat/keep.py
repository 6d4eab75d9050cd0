"""A pytest plugin for gpu-compat.sh: which tests of a suite are run, and how each of them ended.

COMPAT_CASES is how many tests are kept: the ones whose names have the smallest hashes, so that the same ones are
kept on every machine and nobody chooses them. COMPAT_OUT is the file that gets one line of JSON for each test.
"""

import hashlib
import json
import os
import re

import numpy

from words import plain

if not hasattr(numpy, "row_stack"):  # of newer releases; numba-cuda's tests load it by that name
    numpy.row_stack = numpy.vstack


def _rank(item):
    return hashlib.sha256(_name(item.nodeid).encode()).hexdigest()


def _name(nodeid):
    # Installed tests, and some parameters, are named by where they lie.
    return re.sub(r"\[/.*/", "[", re.sub(r"^.*site-packages/", "", nodeid))


def pytest_collection_modifyitems(config, items):
    most = int(os.environ.get("COMPAT_CASES", "0"))
    only = os.environ.get("COMPAT_ONLY")
    if only:
        with open(only) as f:
            wanted = set(f.read().splitlines())
        items[:] = [i for i in items if _name(i.nodeid) in wanted]
    elif 0 < most < len(items):
        chosen = set(sorted(_rank(i) for i in items)[:most])
        items[:] = [i for i in items if _rank(i) in chosen]


def _why(report):
    text = str(report.longrepr or "")
    last = [line for line in text.splitlines() if line.startswith("E  ")] or text.splitlines()[-1:]
    said = [
        line
        for _, section in report.sections
        for line in section.splitlines()
        if "sluice" in line.lower()
    ]
    return plain(" | ".join([" ".join(last[:3])] + said[-2:]))[:600]


def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return  # the controller hears of it, too, and of the worker's death
    if report.when == "setup" and report.passed:
        return
    if report.when == "teardown" and not report.failed:
        return
    line = {
        "case": _name(report.nodeid),
        "result": "skip" if report.skipped else report.outcome[:4],
        "seconds": round(getattr(report, "duration", 0), 2),
    }
    if report.failed:
        line["why"] = _why(report)
    with open(os.environ["COMPAT_OUT"], "a") as f:
        f.write(json.dumps(line) + "\n")
