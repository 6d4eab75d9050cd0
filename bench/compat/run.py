#!/usr/bin/env python3
"""Runs other people's tests and programs natively and remotely, side by side, and writes how each ended.

run.py --sources DIR --out DIR --remote 'COMMAND...' [--only SUITE,...[/SUITE,...]] [--cases SUITE=N,...] [--jobs N] [--budget S]

DIR of --sources has a folder for each suite (docs/compatibility.md says which files of which release). --remote is
what is put before a command so that it runs through Sluice. Groups of suites with a slash between them run side by side, the
suites of a group one after the other. Written: native.jsonl and remote.jsonl, a line for each case: suite, case, result
(pass, fail, skip), seconds, why. A case that crashes or hangs is one case that failed.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import builds
from words import plain

HERE = os.path.dirname(os.path.abspath(__file__))
SECONDS = 180  # for one case; some take 80 natively when other suites run beside them

# How many cases of each suite are run unless --cases says otherwise.
CASES = {
    "samples": 1000, "programs": 1000, "torch": 320, "cupy": 420, "numba": 420, "jax": 320,
    "benchmarks": 120, "libraries": 1000, "cudacore": 1000, "cudabindings": 1000,
}

JAX_FILES = """api_test array_test lax_numpy_test lax_test lax_control_flow_test lax_scipy_test linalg_test fft_test
random_test nn_test memories_test python_callback_test image_test ode_test sparse_bcoo_bcsr_test pjit_test
export_test svd_test lax_vmap_test scipy_stats_test debugging_primitives_test jet_test shard_map_test ffi_test
lax_numpy_einsum_test lax_numpy_indexing_test lax_numpy_reducers_test buffer_callback_test fused_attention_stablehlo_test
pallas/pallas_test pallas/ops_test""".split()


class Mode:
    """One side of the comparison: where its commands run and where their results go."""

    def __init__(self, name, prefix, out):
        self.name, self.prefix = name, prefix
        self.path = os.path.join(out, name + ".jsonl")
        self.logs = os.path.join(out, "logs-" + name)
        os.makedirs(self.logs, exist_ok=True)
        self.lock = threading.Lock()

    def write(self, suite, line):
        with self.lock, open(self.path, "a") as f:
            f.write(json.dumps({"suite": suite, **line}) + "\n")


def run(argv, seconds, cwd=None, env=None, log=None):
    """Runs a command in a process group of its own: its exit status, or "time", and its output."""
    with open(log, "w+") if log else open(os.devnull, "w+") as f:
        p = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return p.wait(seconds)
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            try:
                os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            p.wait()


def said(log):
    """The last lines that tell why a program failed."""
    with open(log, errors="replace") as f:
        lines = [line.strip() for line in f if line.strip()]
    named = [line for line in lines if "sluice" in line.lower()]
    return plain(" | ".join(lines[-2:] + named[-2:]))[:600]


def executables(suite, cases, mode, jobs, deadline):
    """Runs cases of (name, argv, cwd, env) in mode, jobs at a time; the exit status says how each ended."""

    def one(case):
        name, argv, cwd, env = case
        if time.monotonic() > deadline:
            mode.write(suite, {"case": name, "result": "skip", "seconds": 0, "why": "no time left"})
            return
        log = os.path.join(mode.logs, "%s-%s.log" % (suite, name.replace("/", "_")))
        begun = time.monotonic()
        env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", **env)  # several share the GPU
        seconds = SECONDS
        if suite in builds.SUITES:
            seconds = builds.SECONDS
            cwd = builds.copy(cwd, mode.name)  # a program may write files beside itself
        status = run(mode.prefix + argv, seconds, cwd, env, log)
        line = {"case": name, "result": "pass" if status == 0 else "fail", "seconds": round(time.monotonic() - begun, 2)}
        if suite == "samples" and status == 2:
            line["result"] = "skip"  # the samples' own word for "waived"
        if suite in builds.SUITES and builds.complains(log):
            line["result"] = "fail"
        if line["result"] == "fail":
            line["why"] = "status %s: %s" % (status, said(log))
        if suite == "programs" and status == 0:
            with open(log, errors="replace") as f:
                line["digest"] = hashlib.sha256(
                    "".join(x for x in f if x.startswith("= ")).encode()
                ).hexdigest()[:16]
        mode.write(suite, line)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cases))


def build_samples(sources, budget):
    """Builds NVIDIA's samples for this GPU; what does not build is no case."""
    root = os.path.join(sources, "samples")
    cc = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0].replace(".", "")
    for path in glob.glob(root + "/**/CMakeLists.txt", recursive=True):
        with open(path) as f:
            text = f.read()
        out = []
        for line in text.splitlines(True):
            if "set(CMAKE_CUDA_ARCHITECTURES" in line:
                line = "set(CMAKE_CUDA_ARCHITECTURES %s)\n" % cc
            if line.startswith("add_subdirectory(") and not os.path.isdir(
                os.path.join(os.path.dirname(path), line[len("add_subdirectory(") :].split(")")[0])
            ):
                continue
            out.append(line)
        with open(path, "w") as f:
            f.writelines(out)
    b = os.path.join(root, "build")
    env = dict(os.environ, PATH=os.environ["PATH"] + ":/usr/local/cuda/bin")
    status = run(["cmake", "-G", "Ninja", "-S", root, "-B", b, "-DCMAKE_BUILD_TYPE=Release"], 120, env=env, log=root + "/cmake.log")
    if status == 0:
        status = run(["ninja", "-C", b, "-k", "0"], budget, env=env, log=root + "/ninja.log")
    print("samples: built, ninja's status %s" % status, flush=True)


def samples(sources):
    root = os.path.join(sources, "samples")
    with open(os.path.join(root, "test_args.json")) as f:
        args = json.load(f)
    cases = []
    for source in sorted(glob.glob(root + "/Samples/*/*/")):
        name = os.path.basename(source.rstrip("/"))
        at = source.replace(root + "/Samples", root + "/build/Samples")
        exe = os.path.join(at, name)
        if not os.access(exe, os.X_OK) or os.path.isdir(exe):
            continue
        if os.path.isdir(source + "data") and not os.path.exists(at + "data"):
            os.symlink(source + "data", at + "data")
        known = args.get(name, {})
        if known.get("skip"):
            continue
        runs = known.get("runs", [known])
        for i, r in enumerate(runs):
            case = name if len(runs) == 1 else "%s-%d" % (name, i)
            cases.append((case, [exe] + r.get("args", []), at, {}))
    return cases


def programs():
    names = subprocess.run([sys.executable, HERE + "/programs.py"], capture_output=True, text=True, check=True).stdout.split()
    return [(n, [sys.executable, HERE + "/programs.py", n], HERE, {}) for n in names]


def pytest(suite, sources, mode, cases, jobs, seconds, only):
    """Runs a suite of pytest's in mode; a process that dies costs the case that it was at."""
    ini = os.path.join(mode.logs, suite + ".ini")  # instead of the suites' own: there warnings are errors
    with open(ini, "w") as f:
        f.write("[pytest]\n")
    cwd, args = {
        "torch": (HERE, ["test_torch.py"]),
        "cupy": (
            sources + "/cupy/tests",
            ["cupy_tests", "cupyx_tests", "--ignore=cupy_tests/testing_tests", "-c", ini, "--rootdir=."],
        ),
        "numba": (sources, ["-c", ini, "--benchmark-disable", "-o", "consider_namespace_packages=true", "-p", "conftest", "--pyargs", "numba.cuda.tests"]),
        "jax": (
            sources + "/jax",
            ["-c", ini, "--rootdir=.", "--import-mode=importlib"] + ["tests/%s.py" % f for f in JAX_FILES],
        ),
        "cudacore": (
            sources + "/cudapython/cuda_core/tests",
            ["-c", ini, "--rootdir=.", "--ignore=cython", "--ignore=test_build_hooks.py", "--ignore=example_tests", "."],
        ),
        # Root's test_compute_mode forbids the GPU to all for a while, natively too.
        "cudabindings": (
            sources + "/cudapython/cuda_bindings/tests",
            ["-c", ini, "--rootdir=.", "--ignore=cython", "--ignore=nvml/test_compute_mode.py", "."],
        ),
    }[suite]
    out = os.path.join(mode.logs, suite + ".jsonl")
    if os.path.exists(out):
        os.remove(out)  # of an earlier run
    env = dict(
        os.environ,
        COMPAT_OUT=out,
        COMPAT_CASES=str(cases),
        PYTHONPATH=os.pathsep.join([HERE, sources + "/numba/testing", os.environ.get("PYTHONPATH", "")]),
        PYTHONHASHSEED="0",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        JAX_NUM_GENERATED_CASES="5",
        JAX_TRACEBACK_FILTERING="off",
        CUPY_CACHE_DIR=os.path.join(mode.logs, "cupy-cache"),
    )
    if suite.startswith("cuda"):
        here = [sources + "/cudapython/site", sources + "/cudapython/cuda_python_test_helpers", env["PYTHONPATH"]]
        env.update(PYTHONPATH=os.pathsep.join(here), CUDA_PATH="/usr/local/cuda")
    if only:
        env["COMPAT_ONLY"] = only
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "keep", "-p", "no:cacheprovider", "-n", str(jobs)]
    argv += ["--dist", "load", "--timeout", str(SECONDS), "--timeout-method", "thread", "--max-worker-restart", "200", "--tb", "short"]
    status = run(mode.prefix + argv + args, seconds, cwd, env, os.path.join(mode.logs, suite + ".log"))
    n = 0
    if os.path.exists(out):
        with open(out) as f:
            for line in f:
                mode.write(suite, json.loads(line))
                n += 1
    print("%s, %s: status %s, %d cases" % (suite, mode.name, status, n), flush=True)


def one_by_one(suites, a, modes, most, deadline):
    """Runs suites, one after the other, in all modes."""
    names = set(open(a.names).read().splitlines()) if a.names else None
    for suite in suites:
        left = int(deadline - time.monotonic())
        if left < 10:
            print("%s: not run, no time left" % suite, flush=True)
            continue
        begun = time.monotonic()
        if suite in ("samples", "programs") or suite in builds.SUITES:
            if suite == "samples" and not os.path.exists(a.sources + "/samples/build"):
                build_samples(a.sources, left)
            if suite in builds.SUITES:
                cases = builds.cases(suite, a.sources, most[suite], names, left)
            else:
                cases = samples(a.sources) if suite == "samples" else programs()
                cases.sort(key=lambda c: hashlib.sha256(c[0].encode()).hexdigest())
                cases = [c for c in cases if not names or c[0] in names][: most[suite]]
            work = [(executables, (suite, cases, m, a.jobs, deadline)) for m in modes]
        else:
            work = [(pytest, (suite, a.sources, m, most[suite], a.jobs, left, a.names)) for m in modes]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for f in [pool.submit(fn, *args) for fn, args in work]:
                f.result()
        print("%s: %.0f s" % (suite, time.monotonic() - begun), flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--sources", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--remote", required=True)
    ap.add_argument("--only", default=",".join(CASES))
    ap.add_argument("--cases", default="")
    ap.add_argument("--names", default="", help="a file with the names of the only cases to run")
    ap.add_argument("--modes", default="native,remote")
    ap.add_argument("--jobs", type=int, default=6)
    ap.add_argument("--budget", type=int, default=540, help="seconds for all")
    a = ap.parse_args()
    most = dict(CASES, **{k: int(v) for k, v in (c.split("=") for c in a.cases.split(",") if c)})
    a.sources = os.path.abspath(a.sources)
    deadline = time.monotonic() + a.budget
    a.out = os.path.abspath(a.out)
    modes = [Mode("native", [], a.out), Mode("remote", shlex.split(a.remote), a.out)]
    modes = [m for m in modes if m.name in a.modes.split(",")]
    groups = [g.split(",") for g in a.only.split("/")]
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        for f in [pool.submit(one_by_one, g, a, modes, most, deadline) for g in groups]:
            f.result()


main()
