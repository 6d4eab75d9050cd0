"""What a build costs against an older one, for gpu-cost.sh: the same programs by either, in turn.

cost.py run --old DIR ADDR PID --new DIR ADDR PID --launch BIN --open BIN --seconds N [--cycles N] [--mem SIZE] [--only launch,open,mlp,resnet50]
    runs pairs of them, in the order of CYCLE again and again, until another pair would end after N seconds. DIR is a build, ADDR its
    worker, PID its process. In every other pair of a program the new build goes first. One line of JSON for each run. Where there
    are enough processors, programs have PROCESSORS of them and workers as many others: which ones its threads happen to have
    makes a small program faster or slower for as long as it lives.
cost.py report LOG
    judges a log of these: PASS if the new build is worse by 1 % at most, FAIL if it is worse by more, OPEN if
    pairs differ so much that 1 % cannot be told. Exit status 1 unless all pass.
cost.py page LOG
    the table of docs/benchmarks.md
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import rawlog
from grace import error, spread

HERE = Path(__file__).parent
MOST = 0.01  # of the older build
PROCESSORS = 4
CYCLE = ("launch", "open", "mlp", "open", "launch", "open", "mlp", "open", "resnet50")
MEASURED = {
    "enqueue": ("launch, us to enqueue it", "launch", lambda r: r["launch_us"][0]),
    "cpu": ("launch, us of the program's processors", "launch", lambda r: r["launch_us"][3]),
    "open": ("from start to the first answer of a session, ms", "open", lambda r: r["first_ms"]),
    "mlp": ("MLP, ms a step", "mlp", lambda r: r["median_ms"]),
    "resnet50": ("ResNet-50, batch 32, ms a step", "resnet50", lambda r: r["median_ms"]),
}


def programs(a):
    return {
        "launch": [a.launch, "10"],
        "open": [a.open],
        "mlp": [a.python, str(HERE / "mlp.py"), "--steps", "200", "--repeats", "7"],
        "resnet50": [a.python, str(HERE / "resnet50.py"), "--batch", "32", "--steps", "10", "--repeats", "7"],
    }


def once(command, name):
    """(ms until it has answered, its last line)"""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as p:
        last = p.stdout.readline()
        ms = 1000 * (time.monotonic() - began)
        last = (last + p.stdout.read()).splitlines()[-1:]
    if p.returncode or not last:
        sys.exit(f"{name}: exit status {p.returncode}")
    return ms, last[0]


def commit(build):
    os.environ["SLUICE_BUILD"] = build
    return rawlog.commit()


def parent(stat):
    try:
        return stat.read_text().rpartition(")")[2].split()[1]
    except OSError:  # it has ended
        return ""


def pin(workers):
    """Gives this process and all that it starts some processors, and workers with their sessions others. Answers how many; 0: there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2 * PROCESSORS:
        return 0
    sessions = [p.parent.name for p in Path("/proc").glob("[0-9]*/stat") if parent(p) in workers]  # which are kept ready
    for pid in (*workers, *sessions):
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), mine[PROCESSORS : 2 * PROCESSORS])
    os.sched_setaffinity(0, mine[:PROCESSORS])
    return PROCESSORS


def run(a):
    begun, longest, done = time.monotonic(), {}, {}
    builds = {"old": a.old, "new": a.new}
    commits = {which: commit(build) for which, (build, _, _) in builds.items()}
    print(json.dumps(commits | {"processors": pin([pid for _, _, pid in builds.values()])}), flush=True)
    for name in a.cycles * [name for name in CYCLE if name in a.only.split(",")]:
        pair_began = time.monotonic()
        if pair_began - begun + longest.get(name, 0) > a.seconds:
            break
        done[name] = done.get(name, 0) + 1
        for which in ("old", "new") if done[name] % 2 else ("new", "old"):
            build, addr, _ = builds[which]
            prefix = [f"{build}/bin/sluice", "run", "--lib", f"{build}/shim", "--worker", addr, *(["--mem", a.mem] if a.mem else []), "--"]
            first, line = once([*prefix, *programs(a)[name]], f"{name} of the {which} build")
            result = {"first_ms": round(first, 3)} if name == "open" else json.loads(line)
            print(json.dumps({"run": f"{name}.{which}.{done[name]}", "result": result}), flush=True)
        longest[name] = max(longest.get(name, 0), time.monotonic() - pair_began)


def read(log):
    """(the builds' commits, {program: [{build: result}]}) of the pairs that have run"""
    commits, runs = {"old": "unknown", "new": "unknown"}, {}
    for r in rawlog.read(log):
        if "run" in r:
            name, which, number = r["run"].split(".")
            runs.setdefault(name, {}).setdefault(number, {})[which] = r["result"]
        elif "old" in r:
            commits = r
    return commits, {name: [r for r in pairs.values() if len(r) == 2] for name, pairs in runs.items()}


def costs(log):
    """For each figure: what it is, the older build's and the newer's in each pair, the part by which the newer is worse and the standard error of that."""
    _, runs = read(log)
    for what, name, of in MEASURED.values():
        pairs = runs.get(name)
        if pairs:
            old, new = ([of(r[which]) for r in pairs] for which in ("old", "new"))
            ratios = [n / o for o, n in zip(old, new)]
            yield what, old, new, statistics.median(ratios) - 1, error(ratios)


def verdict(cost, e):
    if cost - 2 * e > MOST:
        return "FAIL"
    return "PASS" if cost <= MOST and e <= MOST else "OPEN"


def percent(cost, e):
    return f"{100 * cost:+.2f} % ± {100 * e:.2f}"


def page(log):
    head, (commits, _) = rawlog.headers(log)[0], read(log)
    yield f"{head['gpu']}, driver {head['driver']}, PyTorch {head.get('pytorch', 'unknown')}, commit {commits['new']} against {commits['old']}, {head['date'][:10]}."
    if commits.get("processors"):
        yield f"Programs had {commits['processors']} of {head['cores']} processors, workers {commits['processors']} others."
    yield ""
    yield f"| median (least to most) | {commits['old']} | {commits['new']} | worse by, median of the pairs ± its standard error | pairs |"
    yield "|---" * 5 + "|"
    for what, old, new, cost, e in costs(log):
        yield f"| {what} | {spread(old)} | {spread(new)} | {percent(cost, e)} | {len(old)} |"


def report(log):
    for text in page(log):
        print(text)
    verdicts = []
    for what, _, _, cost, e in costs(log):
        verdicts.append(verdict(cost, e))
        print(f"{verdicts[-1]} {what}: worse by {percent(cost, e)}, at most {100 * MOST:.0f} %" + (": the spread is too wide to tell" if verdicts[-1] == "OPEN" else ""))
    return 0 if verdicts and set(verdicts) == {"PASS"} else 1


def main():
    p = argparse.ArgumentParser()
    sub = p.add_subparsers(dest="what", required=True)
    for name in ("report", "page"):
        sub.add_parser(name).add_argument("log")
    q = sub.add_parser("run")
    for flag in ("old", "new"):
        q.add_argument("--" + flag, nargs=3, required=True)
    for flag in ("launch", "open"):
        q.add_argument("--" + flag, required=True)
    q.add_argument("--python", default=sys.executable)
    q.add_argument("--seconds", type=float, required=True)
    q.add_argument("--cycles", type=int, default=100, help="the most of them")
    q.add_argument("--mem", default="")
    q.add_argument("--only", default="launch,open,mlp,resnet50")
    a = p.parse_args()
    if a.what == "run":
        run(a)
    elif a.what == "page":
        print(*page(a.log), sep="\n")
    else:
        sys.exit(report(a.log))


if __name__ == "__main__":
    main()
