"""Suites of programs that are built here with nvcc: HeCBench's benchmarks and the samples of NVIDIA's libraries.

benchmarks: DIR/hecbench/src/NAME-cuda, each with a Makefile whose target "run" says what is run with which arguments.
libraries: DIR/libraries/LIBRARY/.../NAME, each folder's sources are one program, or one program for each that has a main.
What does not build is no case.
"""

import concurrent.futures
import glob
import hashlib
import os
import re
import shutil
import subprocess
import time

SUITES = ("benchmarks", "libraries")
NVCC = "/usr/local/cuda/bin/nvcc"
LIBRARIES = "-lcublas -lcublasLt -lcusolver -lcusparse -lcufft -lcurand -lnvJitLink -lnvrtc -lcuda".split()
BUILD_SECONDS = 60  # for one program
SECONDS = 40  # for one case
ENV = dict(os.environ, PATH="/usr/local/cuda/bin:" + os.environ["PATH"])


def arch():
    cc = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    return "sm_" + cc.replace(".", "")


def copy(folder, mode):
    """The folder's own copy for a mode, made at its first use."""
    to = folder.rstrip("/") + "." + mode
    if not os.path.isdir(to):
        shutil.copytree(folder, to, symlinks=True, copy_function=_copy)
    return to


def _copy(file, to):
    """Links a program and copies what it may write to: a program that a thread writes cannot be executed while another thread starts a process."""
    if os.access(file, os.X_OK):
        return os.link(file, to)
    return shutil.copy2(file, to)


def complains(log):
    """Whether a program that checks its own results says that they are wrong; many end with status 0 then."""
    with open(log, errors="replace") as f:
        return re.search(r"\bfail(ed|ure)?\b|\bmismatch|\bincorrect\b|cuda error|illegal", f.read(), re.I) is not None


def _built(argv, cwd):
    try:
        p = subprocess.run(argv, cwd=cwd, env=ENV, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECONDS)
        return p.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _benchmark(folder, gpu):
    if not _built(["make", "-s", "ARCH=" + gpu, "CC=nvcc"], folder):
        return []
    return [(os.path.basename(folder)[: -len("-cuda")], ["make", "-s", "run", "ARCH=" + gpu, "CC=nvcc"], folder, ENV)]


def _library(folder, gpu):
    root = folder[: folder.index("/libraries/")] + "/libraries/"
    name = folder[len(root) :].replace("/", "-")
    sources = sorted(glob.glob(folder + "/*.cu") + glob.glob(folder + "/*.cpp") + glob.glob(folder + "/*.c"))
    mains = [s for s in sources if re.search(r"^\s*(int|auto) main\b", open(s, errors="replace").read(), re.M)]
    include = []
    at = folder
    while len(at) > len(root) - 1:
        include += ["-I" + at, "-I" + at + "/utils", "-I" + at + "/include", "-I" + at + "/Common"]
        at = os.path.dirname(at)
    cases = []
    for m in mains:
        case = name if len(mains) == 1 else name + "-" + os.path.splitext(os.path.basename(m))[0]
        exe = os.path.join(folder, "run-" + os.path.basename(m) + ".exe")
        parts = [m] + [s for s in sources if s not in mains]
        if _built([NVCC, "-std=c++17", "-w", "-arch=" + gpu, "-o", exe] + include + parts + LIBRARIES, folder):
            cases.append((case, ["./" + os.path.basename(exe)], folder, ENV))
    return cases


def cases(suite, sources, most, names, budget):
    """Builds the programs of a suite, the ones with the smallest hashes of their names, and returns them as cases."""
    if suite == "benchmarks":
        folders = [f for f in glob.glob(sources + "/hecbench/src/*-cuda") if os.path.exists(f + "/Makefile")]
    else:
        folders = [os.path.dirname(f) for f in glob.glob(sources + "/libraries/**/CMakeLists.txt", recursive=True)]
    folders.sort(key=lambda f: hashlib.sha256(os.path.basename(f).encode()).hexdigest())
    if names:
        folders = [f for f in folders if any(os.path.basename(f).startswith(n) or os.path.basename(f) in n for n in names)]
    begun, gpu = time.monotonic(), arch()
    build = _benchmark if suite == "benchmarks" else _library
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [c for cs in pool.map(lambda f: build(f, gpu), folders[:most]) for c in cs]
    print("%s: %d folders, %d programs built in %.0f s" % (suite, len(folders[:most]), len(found), time.monotonic() - begun), flush=True)
    return found
