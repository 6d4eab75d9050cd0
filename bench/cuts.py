"""Cuts of a training's network, for gpu-cuts.sh: programs run natively, remotely, and remotely with cuts.

cuts.py train --sluice CMD --worker ADDR --relay BIN --scratch DIR [--cuts 10] [--length 60] [--seconds 45] [--seed N]
    runs resnet50 and transformer side by side: natively for --seconds, then as many steps remotely, then those with cuts
    at random moments. One line of JSON for each run, with the cuts of the last.
cuts.py over --sluice CMD --worker ADDR --relay BIN --scratch DIR --grace S
    cuts a program for longer than the worker's grace. One line of JSON.
cuts.py report LOG
    judges a log of these. Exit status 1 if anything was lost, wrong, or late.
cuts.py page LOG
    the table of docs/benchmarks.md

A cut is one of three kinds, in turn: connections are reset, bytes are lost, or nothing is heard.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import rawlog

NAMES = ("resnet50", "transformer")
KINDS = ("reset", "silence", "drop")
TRAIN = Path(__file__).with_name("cut_train.py")


STARTED = []  # what has to end with this program, each in a process group of its own


def start(argv, **how):
    STARTED.append(subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True, **how))
    return STARTED[-1]


def end_all():
    for p in STARTED:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()


class Relay:
    """A relay before the worker, whose network can be cut."""

    def __init__(self, binary, worker):
        self.p = start([binary, "--listen", "127.0.0.1:0", "--to", worker.removeprefix("tcp:"), "--cuts"], stdin=subprocess.PIPE)
        self.addr = "tcp:" + self.until("listening").split()[1]

    def until(self, begin):
        for line in self.p.stdout:
            if line.startswith(begin):
                return line
        raise RuntimeError("the relay has ended")

    def become(self, state):
        """When the network is in that state, by CLOCK_MONOTONIC."""
        self.p.stdin.write(state + "\n")
        self.p.stdin.flush()
        self.until("network " + state)
        return time.monotonic()


class Program:
    def __init__(self, a, name, run, prefix, steps=0):
        self.name, self.out, self.err = name, Path(a.scratch, f"{name}-{run}.json"), Path(a.scratch, f"{name}-{run}.err")
        self.done = 0  # steps, as far as it has said after it was ready
        self.out.unlink(missing_ok=True)
        limit = ["--steps", str(steps)] if steps else ["--seconds", str(a.seconds)]
        with open(self.err, "w") as err:
            self.p = start([*prefix, *shlex.split(a.program), name, str(self.out), *limit], stderr=err)

    def ready(self):
        for line in self.p.stdout:
            if line.startswith("ready"):
                threading.Thread(target=self.count, daemon=True).start()
                return
        raise RuntimeError(f"{self.name} has ended before it was ready: {self.err.read_text()[-2000:]}")

    def count(self):
        for line in self.p.stdout:
            if line.startswith("step "):
                self.done = int(line.split()[1])

    def result(self):
        """What it wrote, without the times of the steps, which are returned beside it."""
        status, said = self.p.wait(), {}
        if self.out.exists():
            said = json.loads(self.out.read_text())
        ends, losses = said.pop("ends", []), said.pop("losses", [])
        said |= {
            "status": status,
            "steps": len(ends),
            "losses": hashlib.sha256(" ".join(losses).encode()).hexdigest() if losses else None,
            "last": losses[-1] if losses else None,
            "seconds": ends[-1] - ends[0] if ends else None,
            "said": [line for line in self.err.read_text().splitlines() if line.startswith("sluice: ")],
        }
        if status:
            said["error"] = self.err.read_text()[-1000:]
        return said, ends


def line(run, **fields):
    print(json.dumps({"run": run, **fields}), flush=True)


def side_by_side(a, run, prefix, steps):
    programs = [Program(a, name, run, prefix, steps.get(name, 0)) for name in NAMES]
    for p in programs:
        p.ready()
    results = {p.name: p.result()[0] for p in programs}
    line(run, programs=results)
    return results


def remote(a, addr):
    return [*shlex.split(a.sluice), "run", "--worker", addr, *(["--mem", a.mem] if a.mem else []), "--"]


def resumed(ends, cut):
    """How long after the cut the first step ended, and how long a step takes otherwise."""
    after = [t for t in ends if t > cut["end"]]
    steps = sorted(b - a for a, b in zip(ends, ends[1:]))
    return {"after_s": after[0] - cut["end"], "step_s": steps[len(steps) // 2]} if after else None


def moments(rng, cuts):
    """The parts of the work, from 0 to 1, that are done when a cut begins: random ones, the last well before the end."""
    waits = [rng.uniform(0.3, 1.7) for _ in range(cuts)]
    scale = rng.uniform(0.6, 0.85) / sum(waits)
    return [sum(waits[: i + 1]) * scale for i in range(cuts)]


def furthest(programs, steps):
    """The largest part of its steps that a program has done."""
    return max(1.0 if p.p.poll() is not None else p.done / steps[p.name] for p in programs)


def train(a):
    rng, relay = random.Random(a.seed), Relay(a.relay, a.worker)
    steps = {name: r["steps"] for name, r in side_by_side(a, "native", [], {}).items()}
    side_by_side(a, "uncut", remote(a, relay.addr), steps)
    programs = [Program(a, name, "cut", remote(a, relay.addr), steps[name]) for name in NAMES]
    for p in programs:
        p.ready()
    cuts = []
    for i, moment in enumerate(moments(rng, a.cuts)):
        while furthest(programs, steps) < moment:
            time.sleep(rng.uniform(0, 0.02))
        kind = KINDS[i % len(KINDS)]
        begin = relay.become(kind)
        print(f"cut {i + 1} of {a.cuts}: {kind}", file=sys.stderr, flush=True)
        time.sleep(a.length)
        cuts.append({"kind": kind, "begin": begin, "end": relay.become("mend")})
        print(f"cut {i + 1} of {a.cuts}: over", file=sys.stderr, flush=True)
    results = {}
    for p in programs:
        results[p.name], ends = p.result()
        results[p.name]["resumed"] = [resumed(ends, c) for c in cuts]
    line("cut", programs=results, cuts=[{"kind": c["kind"], "seconds": c["end"] - c["begin"]} for c in cuts])


def used():
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
        return int(said.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def over(a):
    relay, before = Relay(a.relay, a.worker), used()
    p = Program(a, "transformer", "over", remote(a, relay.addr), 1 << 30)
    p.ready()
    most = used()
    begin = relay.become("reset")
    p.p.wait(timeout=a.grace + 30)
    ended = time.monotonic()
    free, after = None, None
    while time.monotonic() < ended + 10:
        after = used()
        if before is None or after is not None and after <= before + 8:
            free = time.monotonic()
            break
        time.sleep(0.05)
    said, _ = p.result()
    mib = {"before": before, "most": most, "after": after}
    line("over", grace_s=a.grace, error_after_s=ended - begin - a.grace, free_after_s=free - begin - a.grace if free else None, mib=mib, program=said)


def costs(runs, name):
    """Seconds by which the program took longer than uncut and the cuts together, and by which each cut's next step was late; None: there was none."""
    uncut, cut = (runs[r]["programs"][name] for r in ("uncut", "cut"))
    longer = cut["seconds"] - uncut["seconds"] - sum(c["seconds"] for c in runs["cut"]["cuts"])
    return longer, [r and r["after_s"] - r["step_s"] for r in cut["resumed"]]


def judge(runs):
    """What is wrong, and lines of figures."""
    wrong, figures = [], []
    native, uncut, cut = (runs.get(r, {}).get("programs", {}) for r in ("native", "uncut", "cut"))
    for name in native:
        for run, programs in (("uncut", uncut), ("cut", cut)):
            for key in ("status", "steps", "losses", "weights"):
                if programs.get(name, {}).get(key) != native[name][key]:
                    wrong.append(f"{name}, {run}: {key} {programs.get(name, {}).get(key)}, natively {native[name][key]}")
        if native[name]["status"] or not native[name]["losses"]:
            wrong.append(f"{name}: failed natively")
        c = cut.get(name, {})
        if not c.get("seconds") or not uncut.get(name, {}).get("seconds"):
            continue
        lengths = [x["seconds"] for x in runs["cut"]["cuts"]]
        longer, late = costs(runs, name)
        if None in late:
            wrong.append(f"{name}: no step after {late.count(None)} of {len(late)} cuts")
            continue
        figures.append(
            f"{name}: {c['steps']} steps, {native[name]['seconds']:.1f} s natively, {uncut[name]['seconds']:.1f} s uncut, {c['seconds']:.1f} s with {len(lengths)} cuts"
            f" of {min(lengths):.1f} to {max(lengths):.1f} s: {longer:+.1f} s beside them; a step ended {min(late):.2f} to {max(late):.2f} s after a cut beyond its own time"
        )
        if longer > len(lengths) or max(late) > 1:
            wrong.append(f"{name}: longer by {longer:.1f} s than the cuts, a step late by {max(late):.2f} s: more than a second each")
    if o := runs.get("over"):
        figures.append(
            f"longer than the grace of {o['grace_s']:g} s: the program ended {o['error_after_s']:.2f} s after it, memory free after {o['free_after_s'] or -1:.2f} s; MiB {o['mib']}"
        )
        if not o["program"]["status"] or not -0.5 < o["error_after_s"] <= 1:
            wrong.append(f"the error came {o['error_after_s']:.2f} s after the grace, status {o['program']['status']}")
        if o["free_after_s"] is None:
            wrong.append(f"memory was not free: MiB {o['mib']}")
    return wrong, figures


def read(log):
    return {r["run"]: r for r in rawlog.read(log) if "run" in r}


def page(log):
    head, runs = rawlog.headers(log)[0], read(log)
    cuts = runs["cut"]["cuts"]
    yield f"{head['gpu']}, driver {head['driver']}, PyTorch {head.get('pytorch', 'unknown')}, commit {head['commit']}, {head['date'][:10]}."
    yield ""
    yield f"| both side by side | steps | native, s | remote, s | with {len(cuts)} cuts of {max(c['seconds'] for c in cuts):.0f} s | beside the cuts, s | a step ended after a cut, beyond its own time | losses and weights |"
    yield "|---" * 8 + "|"
    for name, native in runs["native"]["programs"].items():
        uncut, cut = (runs[r]["programs"][name] for r in ("uncut", "cut"))
        longer, late = costs(runs, name)
        same = all(native[k] == uncut[k] == cut[k] for k in ("losses", "weights"))
        yield (
            f"| {name} | {cut['steps']} | {native['seconds']:.1f} | {uncut['seconds']:.1f} | {cut['seconds']:.1f} | {longer:+.1f} | at most {max(late):.2f} s"
            f" | {'the same, bit for bit' if same else 'DIFFERENT'} |"
        )
    if o := runs.get("over"):
        yield ""
        yield (
            f"With a grace of {o['grace_s']:g} s and a longer cut the program had its error {o['error_after_s']:.2f} s after the grace, and the GPU's memory was free after"
            f" {o['free_after_s']:.2f} s."
        )


def report(log):
    runs = read(log)
    wrong, figures = judge(runs)
    for text in figures:
        print(text)
    for text in wrong:
        print(f"FAIL {text}")
    if not wrong:
        print("PASS losses and weights the same to the bit" if "cut" in runs else "PASS")
    return 1 if wrong else 0


def main():
    p = argparse.ArgumentParser()
    sub = p.add_subparsers(dest="what", required=True)
    for name in ("report", "page"):
        sub.add_parser(name).add_argument("log")
    for name in ("train", "over"):
        q = sub.add_parser(name)
        for flag in ("sluice", "worker", "relay", "scratch"):
            q.add_argument("--" + flag, required=True)
        q.add_argument("--mem", default="")
        q.add_argument("--program", default=shlex.join([sys.executable, str(TRAIN)]))
        q.add_argument("--seconds", type=float, default=45)
        q.add_argument("--cuts", type=int, default=10)
        q.add_argument("--length", type=float, default=60)
        q.add_argument("--seed", type=int, default=18)
        q.add_argument("--grace", type=float, default=10)
    a = p.parse_args()
    if a.what == "report":
        sys.exit(report(a.log))
    if a.what == "page":
        print(*page(a.log), sep="\n")
        return
    try:
        {"train": train, "over": over}[a.what](a)
    finally:
        end_all()


if __name__ == "__main__":
    main()
