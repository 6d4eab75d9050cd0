"""What a grace costs while no connection is lost, for gpu-grace.sh: programs natively, without a grace and with one, in turn.

grace.py run --sluice CMD --shim DIR --zero ADDR --kept ADDR --pair ADDR ADDR --launch BIN [--rounds 5] [--mem SIZE] [--only launch,mlp,resnet50,pair]
    runs each program --rounds times on each of three: natively, on the worker whose grace is 0, and on the one that has one.
    pair is the MLP, and launches, in processes with a session on each of two more workers, the first of which has no
    grace; see mlp_pair.py. One line of JSON for each run.
grace.py report LOG
    judges a log of these. Exit status 1 if a grace costs more than 0.005 of native or 0.02 us of a launch.
grace.py page LOG
    the table of docs/benchmarks.md
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import rawlog

HERE = Path(__file__).parent
VARIANTS = ("native", "zero", "kept")
RATIO, CPU_US = 0.005, 0.02  # the most that a grace may cost


def programs(a):
    trained = ["--steps", str(a.steps), "--repeats", "5"]
    return {
        "launch": [a.launch],
        "mlp": [a.python, str(HERE / "mlp.py"), *trained],
        "resnet50": [a.python, str(HERE / "resnet50.py"), *trained],
    }


def on_both(a, workers, *argv):
    """What a program prints, a line of JSON for each process. One that names two workers shows two devices."""
    env = dict(os.environ, SLUICE_WORKER=",".join(workers))
    env["LD_LIBRARY_PATH"] = ":".join([a.shim, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    p = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True)
    if p.returncode:
        sys.exit(f"pair: exit status {p.returncode}: {p.stdout[-500:]}")
    return [json.loads(line) for line in p.stdout.splitlines()]


def pairs_of(a, n):
    """The MLP and then launches on both workers in turn, by n processes each."""
    script = [a.python, str(HERE / "mlp_pair.py"), "--processes", str(n), "--seconds", str(a.seconds)]
    found = [("both", r.pop("order"), r) for r in on_both(a, a.pair, *script)]
    for i in range(n):
        order = [0, 1] if i % 2 == 0 else [1, 0]
        found += [("launch", order, r) for r in on_both(a, [a.pair[k] for k in order], a.launch, "pair")]
    for i, (what, order, result) in enumerate(found):
        print(json.dumps({"run": f"pair.{what}.{i + 1}", "order": [("zero", "kept")[k] for k in order], "result": result}), flush=True)


def memory(belongs):
    """The most private memory, in KiB, of a process now; belongs(its arguments) says whether the process counts."""
    most = 0
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if not belongs((p / "cmdline").read_bytes().decode(errors="replace").split("\0")):
                continue
            for line in (p / "status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    most = max(most, int(line.split()[1]))
        except OSError:
            continue  # it has ended
    return most


def run(a):
    if "pair" in a.only.split(","):
        pairs_of(a, a.pairs or 2 * a.rounds)
    for i in range(a.rounds):
        for name, argv in programs(a).items():
            if name not in a.only.split(","):
                continue
            for variant in VARIANTS[i % 3 :] + VARIANTS[: i % 3]:
                at = {"zero": a.zero, "kept": a.kept}.get(variant)
                prefix = [*shlex.split(a.sluice), "run", "--worker", at, *(["--mem", a.mem] if a.mem else []), "--"] if at else []
                p, kib = subprocess.Popen([*prefix, *argv], stdout=subprocess.PIPE, text=True), {"client": 0, "session": 0}
                while p.poll() is None:
                    time.sleep(0.2)
                    kib["client"] = max(kib["client"], memory(lambda args: argv[0] in args[:2]))  # sh may run it
                    kib["session"] = max(kib["session"], memory(lambda args: "session" in args))
                out = p.stdout.read()
                if p.returncode:
                    sys.exit(f"{name}, {variant}: exit status {p.returncode}: {out[-500:]}")
                line = {"run": f"{name}.{variant}.{i + 1}", "result": json.loads(out.splitlines()[-1])}
                print(json.dumps(line | ({"kib": kib} if at else {})), flush=True)


def read(log):
    """Results of each program and variant, in order of their rounds, of the programs that have run in all variants."""
    runs = {}
    for r in rawlog.read(log):
        if "run" in r and not r["run"].startswith("pair."):
            name, variant, _ = r["run"].split(".")
            runs.setdefault(name, {v: [] for v in VARIANTS})[variant].append(r)
    return {name: r for name, r in runs.items() if all(r.values())}


def ratios(runs, name, variant):
    """Of native's speed, for each round."""
    return [n["result"]["median_ms"] / r["result"]["median_ms"] for n, r in zip(runs[name]["native"], runs[name][variant])]


def groups(log, what, field):
    """For each process of pair: the figures of its groups of four blocks, each the mean of two without a grace and of two with one."""
    for r in rawlog.read(log):
        if r.get("run", "").startswith(f"pair.{what}."):
            of = dict(zip(r["order"], r["result"][field]))
            yield [[sum(of[v][k : k + 2]) / 2 for v in ("zero", "kept")] for k in range(0, len(of["zero"]), 2)]


def pairs(log):
    """The MLP's speed with a grace, of that without one in the same process: one figure for each two processes, which
    name the workers in either order. A process's own is the median over its groups."""
    found = [statistics.median(zero / kept for zero, kept in g) for g in groups(log, "both", "ms")]
    return [(a * b) ** 0.5 for a, b in zip(found[::2], found[1::2])]


def launch_pairs(log):
    """How many us of the program's processors a launch takes more with a grace than without one in the same process, likewise."""
    found = [statistics.median(kept - zero for zero, kept in g) for g in groups(log, "launch", "cpu_us")]
    return [(a + b) / 2 for a, b in zip(found[::2], found[1::2])]


def error(xs):
    """The standard error of the median, by the median distance from it: a process that others disturbed counts once."""
    if len(xs) < 2:
        return float("inf")
    middle = statistics.median(xs)
    return 1.2533 * 1.4826 * statistics.median(abs(x - middle) for x in xs) / len(xs) ** 0.5


def launches(runs, variant):
    """The program's processor time for a launch in us, for each round."""
    return [r["result"]["launch_us"][3] for r in runs["launch"][variant]]


def costs(runs):
    """For each program: what is measured, its figures without and with a grace, 1 if more is worse or -1, and the most that a grace may cost."""
    for name in runs:
        if name == "launch":
            yield "launch, us of the program's processors", launches(runs, "zero"), launches(runs, "kept"), 1, CPU_US
        else:
            yield f"{name}, of native", ratios(runs, name, "zero"), ratios(runs, name, "kept"), -1, RATIO


def spread(xs):
    return f"{statistics.median(xs):.3f} ({min(xs):.3f} to {max(xs):.3f})"


def sizes(runs, who):
    """KiB without and with a grace, of the program that does nothing but small calls."""
    return [statistics.median(r["kib"][who] for r in runs["launch"][v]) for v in ("zero", "kept")] if "launch" in runs else None


def page(log):
    head, runs = rawlog.headers(log)[0], read(log)
    landed = f", landed as {head['landed']}" if "landed" in head else ""
    yield f"{head['gpu']}, driver {head['driver']}, PyTorch {head.get('pytorch', 'unknown')}, commit {head['commit']}{landed}, {head['date'][:10]}."
    yield ""
    yield "| median (least to most) | grace 0 | grace 5 minutes |"
    yield "|---" * 3 + "|"
    for what, zero, kept, _, _ in costs(runs):
        yield f"| {what} | {spread(zero)} | {spread(kept)} |"
    if p := pairs(log):
        yield f"| mlp, of its speed without a grace in the same process | 1 | {statistics.median(p):.4f} ± {error(p):.4f} (of {len(p)} pairs of processes, {min(p):.4f} to {max(p):.4f}) |"
    if p := launch_pairs(log):
        yield f"| launch, us of the program's processors, more than without a grace in the same process | 0 | {statistics.median(p):.4f} ± {error(p):.4f} (of {len(p)} pairs of processes, {min(p):.4f} to {max(p):.4f}) |"
    for who, word in (("client", "program"), ("session", "session")):
        if s := sizes(runs, who):
            yield f"| memory of the {word} of `launch`, MiB | {s[0] / 1024:.1f} | {s[1] / 1024:.1f} |"


def report(log):
    failed = 0
    for text in page(log):
        print(text)
    for what, cost, most in judged(log):
        verdict = "PASS" if cost <= most else "FAIL"
        failed += verdict == "FAIL"
        print(f"{verdict} {what}: a grace costs {cost:.4f}, at most {most:g}")
    return 1 if failed else 0


def judged(log):
    """What is judged, what a grace costs there, and the most that it may cost. Of the MLP and of launches that is the
    difference within a process where that was measured: from process to process both differ by far more than what is looked for."""
    runs, p, launch = read(log), pairs(log), launch_pairs(log)
    for what, zero, kept, worse, most in costs(runs):
        if not (p and what.startswith("mlp")) and not (launch and what.startswith("launch")):
            yield what, worse * (statistics.median(kept) - statistics.median(zero)), most
    if p:
        # A ratio to native changes by that ratio's part.
        native = statistics.median(ratios(runs, "mlp", "zero")) if "mlp" in runs else 1
        yield f"mlp, of native, by pairs (within {native * error(p):.4f})", native * (1 - statistics.median(p)), RATIO
    if launch:
        yield f"launch, us of the program's processors, by pairs (within {error(launch):.4f})", statistics.median(launch), CPU_US


def main():
    p = argparse.ArgumentParser()
    sub = p.add_subparsers(dest="what", required=True)
    for name in ("report", "page"):
        sub.add_parser(name).add_argument("log")
    q = sub.add_parser("run")
    for flag in ("sluice", "shim", "zero", "kept", "launch"):
        q.add_argument("--" + flag, required=True)
    q.add_argument("--pair", nargs=2, required=True)
    q.add_argument("--python", default=sys.executable)
    q.add_argument("--mem", default="")
    q.add_argument("--rounds", type=int, default=5)
    q.add_argument("--steps", type=int, default=60)
    q.add_argument("--pairs", type=int, default=0, help="processes of pair, unless twice as many as rounds")
    q.add_argument("--seconds", type=float, default=10, help="of one process of pair")
    q.add_argument("--only", default="launch,mlp,resnet50,pair")
    a = p.parse_args()
    if a.what == "run":
        run(a)
    elif a.what == "page":
        print(*page(a.log), sep="\n")
    else:
        sys.exit(report(a.log))


if __name__ == "__main__":
    main()
