#!/usr/bin/env python3
"""cells.py SITE OUT PART...: runs the cells of gpu-shares.sh, one at a time on each GPU, and writes one line of JSON for each.

SITE is a file of gpu-shares.sh that says where things are, and which cells are meant; OUT gets a line as soon as a cell is over.
What the lines say is judged by summary.py. A cell that fails is a line with an error, never a missing one.

Parts: fixed (the percentages, each load beside its like), unlike (the same, each load beside others), together (what launch-bound
tenants do together), lone, switch (the same within one process), floors (best effort, equal, lending), kill, theft (work that outlasts
its turns), vgg, many, and quick, which is a little of each.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from statistics import mean

from tenants import Failed, Lies, Site, Tenant, end_all, stop

LOADS = ("gemm", "copy", "small", "mixed", "graph")
MIXES = ((50, 50), (10, 90), (25, 75), (30, 70), (25, 25, 25, 25), (50, 30, 20))
S = 1_000_000_000
SLOT = S // 10  # of what a tenant counts
FINE = S // 100  # and of what those count that work by turns


def now():
    return time.monotonic_ns()


class Run:
    """What all cells share: the site, the clock and the file that they are written to."""

    def __init__(self, site, out):
        self.site = site
        self.out = open(out, "a", encoding="utf-8")
        self.lock = threading.Lock()
        self.ends = now() + int(site.seconds * S)

    def write(self, record):
        with self.lock:
            print(json.dumps(record), file=self.out, flush=True)
            said = record.get("error") or f"{record['took']:.1f} s"
            print(f"  gpu {record['gpu']} {record['kind']} {record['cell']}: {said}", flush=True)

    def cell(self, gpu, c):
        """Runs c on a GPU, whatever becomes of it."""
        record = {k: v for k, v in c.items() if k not in ("do", "took")} | {"gpu": gpu.index}
        began = now()
        tenants = []
        if began + c["took"] * S > self.ends:
            self.write(record | {"error": "not run, the time is over", "took": 0})
            return
        try:
            record |= c["do"](self, gpu, c, tenants)
        except Failed as e:
            record["error"] = str(e)
        except Exception as e:  # a slip of ours is a cell that failed, not the end of the others
            record["error"] = f"{type(e).__name__}: {e}"
            traceback.print_exc()
        finally:
            stop(tenants)
        self.write(record | {"took": (now() - began) / S})


def start(run, gpu, loads, policy, tenants, how="turns"):
    """One tenant for each (load, percent), all ready."""
    for i, (load, percent) in enumerate(loads):
        own = policy if isinstance(policy, str) else policy[i]
        tenants.append(Tenant(run.site, gpu, [run.site.share, load], percent, own, how))
    for t in tenants:
        t.ready(60)


def shares(run, tenants):
    """What the daemon says of each tenant's lease now; nothing of those without one."""
    found = run.site.leases()
    return {"at": now(), "of": [{"shares": found.get(t.lease, {}).get("shares")} for t in tenants]}


def timed(run, gpu, c, tenants):
    """Tenants side by side, over windows; off, die and tell are told to those that c names, in s after measuring began.

    With solo each of them is alone for so long before and after, best effort, in the same process and the same memory: its
    speed then is what it is measured by. Where a program's memory lies on the GPU alone makes it 5 % faster or slower."""
    n, solo = len(c["tenants"]), c.get("solo", 0)
    start(run, gpu, c["tenants"], "best-effort" if solo else c["policy"], tenants, c.get("how", "turns"))
    begin = now() + S // 20
    first = begin + S // 5
    before = spans(first, solo, n)
    measure = (before[-1][1] + S if solo else begin) + int(c["warm"] * S)
    end = measure + int(c["windows"] * c["window"] * S)
    after = spans(end + S, solo, n)
    alone = list(zip(before, after))
    for i, t in enumerate(tenants):
        line = f"{begin} {first if solo else measure} {after[-1][1] if solo else end}"
        for k, ((a, b), (x, y)) in enumerate(alone):
            line += f" off {a if k else begin} {b} off {x if k else end} {y}" if k != i else ""
        for what, *times in c.get("orders", {}).get(i, ()):
            line += f" {what} " + " ".join(str(measure + int(s * S)) for s in times)
        t.tell(line)
    if solo:
        time.sleep(max(0, before[-1][1] - now()) / S)
        for i, t in enumerate(tenants):
            run.site.change(t, c["tenants"][i][1], c["policy"] if isinstance(c["policy"], str) else c["policy"][i])
    said, victim = [], None
    if "fate" in c:
        victim = fate(run, c, tenants)
    elif "change" in c:
        time.sleep(max(0, measure + c["change"]["at"] * S - now()) / S)
        c["change"]["done"] = [now(), run.site.change(tenants[c["change"]["tenant"]], c["change"]["share"]), now()]
    elif c.get("how", "turns") == "turns":
        for w in range(int(c["windows"]) + 1):
            time.sleep(max(0, measure + w * c["window"] * S - now()) / S)
            said.append(shares(run, tenants))
    if solo:
        time.sleep(max(0, end - now()) / S)
        for i, t in enumerate(tenants):
            run.site.change(t, c["tenants"][i][1], "best-effort")
    late = ((after[-1][1] if solo else end) - now()) / S + 20
    results = [None if victim and i == 0 else t.result(late) for i, t in enumerate(tenants)]
    for r, both in zip(results, alone):
        split(r, [((a - first) // SLOT + 3, (b - first) // SLOT - 1) for a, b in both], (measure - first) // SLOT, (end - first) // SLOT)
    r = {"begin": begin, "measure": measure, "end": end, "results": results, "shares": said}
    return r | ({"victim": victim} if victim else {})


def spans(begin, seconds, n):
    """n spans of so many seconds, one after the other; none of none"""
    return [(begin + int(i * seconds * S), begin + int((i + 1) * seconds * S)) for i in range(n)] if seconds else []


def split(r, alone, a, b):
    """takes what a tenant did alone, in slots of its result, out of it: items per second; what is left is from slot a to b"""
    r["solo"] = [sum(r["items"][x:y]) * S / SLOT / (y - x) for x, y in alone]
    r["alone"] = sum(r["solo"]) / len(alone)
    r["items"], r["gap_us"] = r["items"][a:b], r["gap_us"][a:b]


def abreast(run, gpu, c, tenants):
    """One tenant for each way to the GPU. They work one after the other, again and again: what makes a processor or a GPU slower for
    some seconds does so for all of them."""
    (load, percent), = c["tenants"]
    for how in c["hows"]:
        tenants.append(Tenant(run.site, gpu, [run.site.share, load], percent, c["policy"], how))
    for t in tenants:
        t.ready(60)
    begin = now() + S // 10
    length, period = c["slots"] * FINE, len(tenants) * c["slots"] * FINE
    for i, t in enumerate(tenants):
        first = begin + i * length
        t.tell(f"{begin} {first} {first + c['rounds'] * period} period {period} beat 0 {length} slot {FINE}")
    late = c["rounds"] * period / S + 20
    speeds = {}
    for how, t in zip(c["hows"], tenants):
        items = t.result(late)["items"]
        speeds[how] = [round(mean(items[k + c["skip"]:k + c["slots"]]) * S / FINE, 1) for k in range(0, len(items), period // FINE)]
    return {"load": load, "speeds": speeds}


def together(run, gpu, c, tenants):
    """Tenants who are each alone for a moment and then all at work, again and again: what they do together against what each of them does
    unshared, in the same processes and never more than a second apart."""
    start(run, gpu, c["tenants"], c["policy"], tenants)
    begin, n = now() + S // 10, len(tenants)
    one, all_, rest = (int(c[k] * S) for k in ("one", "all", "rest"))
    period = n * one + all_ + rest
    for i, t in enumerate(tenants):
        t.tell(f"{begin} {begin} {begin + c['rounds'] * period} period {period} beat {i * one} {(i + 1) * one} beat {n * one} {n * one + all_} slot {FINE}")
    late, skip = c["rounds"] * period / S + 20, c["skip"]
    alone, shared, ramp = [], [], []  # ramp: the speed of one alone by slots, of which the first are left out
    for i, t in enumerate(tenants):
        items = t.result(late)["items"]
        rounds = [[k * period // FINE + at // FINE for at in (i * one, n * one)] for k in range(c["rounds"])]
        alone.append([round(mean(items[a + skip[0]:a + one // FINE]) * S / FINE, 1) for a, _ in rounds])
        shared.append([round(mean(items[b + skip[1]:b + all_ // FINE]) * S / FINE, 1) for _, b in rounds])
        ramp.append([round(mean(items[a + k] for a, _ in rounds) * S / FINE) for k in range(one // FINE)])
    return {"alone": alone, "shared": shared, "ramp": ramp}


def switched(run, gpu, c, tenants):
    """A lone tenant on a worker that keeps turns in the even tenths of a second and not in the odd ones."""
    start(run, gpu, c["tenants"], c["policy"], tenants)
    begin = (now() // (2 * SLOT) + 2) * 2 * SLOT
    tenants[0].tell(f"{begin} {begin} {begin + c['rounds'] * 2 * SLOT} slot {FINE}")
    items, n, skip = tenants[0].result(c["rounds"] * 2 * SLOT / S + 20)["items"], SLOT // FINE, c["skip"]
    parts = [round(mean(items[k + skip:k + n]) * S / FINE, 1) for k in range(0, len(items), n)]
    return {"load": c["tenants"][0][0], "on": parts[::2], "off": parts[1::2]}


def fate(run, c, tenants):
    """Sees the first tenant, or its worker, to its end in its own turn; answers when that was."""
    if c["fate"] == "client":
        return {"at": int(tenants[0].line("dies", c["windows"] * c["window"] + 10)[0])}
    pid = run.site.worker_of(tenants[0])
    began = int(tenants[0].line("turn", c["windows"] * c["window"] + 10)[0])
    os.kill(pid, 9 if c["fate"] == "worker" else 19)
    at = now()
    if c["fate"] == "stopped":
        time.sleep(1.5)
        os.kill(pid, 18)
    return {"at": at, "turn": began, "worker": pid}


def crew(run, gpu, load, count, percent):
    """count programs of one lease that leave work on the GPU once they are told to. One that is ended begins again, for as long as the lease lives."""
    script = 'n=$1; shift; for i in $(seq "$n"); do { "$@"; while :; do "$@" </dev/null; done; } <&3 & done 3<&0; wait'
    return Tenant(run.site, gpu, ["sh", "-c", script, "crew", str(count), run.site.thief, load], percent, "fixed", "turns")


def theft(run, gpu, c, tenants):
    """A tenant alone, then beside one that keeps to its turns, then beside the programs of one that does not: what it was delivered in
    each. With lies there is a third lease, of a session that was taken over; then the tenant also works when both have ended."""
    (load, percent), (_, rest), *liar = c["tenants"]
    start(run, gpu, [(load, percent)], "best-effort", tenants)
    length, begin = int(c["seconds"] * S), now() + S // 10
    alone = begin + S
    beside = alone + 3 * S + c["starts"][0] * S  # the others' start takes a while
    thieves = beside + int(c["honest"] * S) + c["starts"][1] * S
    end = thieves + length
    last = end + (5 * S if liar else 0)
    tenants[0].tell(f"{begin} {alone} {last + S}")
    time.sleep(max(0, alone + 3 * S - now()) / S)
    run.site.change(tenants[0], percent, "fixed")
    beside_honest(run, gpu, c, tenants, beside)
    said = [shares(run, tenants)]
    worker = run.site.worker_of(tenants[0]) if liar else None
    gang = crew(run, gpu, c["load"], c["programs"], rest)
    tenants.append(gang)
    gang.ready(c["starts"][1])
    for _ in range(c["programs"] - 1):
        gang.line("ready", c["starts"][1])
    leases = list(tenants)
    if liar:
        tenants.append(Lies(run.site, gpu, c["lies"], leases))  # which ends with them, whatever becomes of this cell
    time.sleep(max(0, thieves - S // 2 - now()) / S)
    gang.tell("")
    time.sleep(max(0, thieves - now()) / S)
    said += [shares(run, leases)]
    time.sleep(max(0, end - now()) / S)
    said += [shares(run, leases)]
    more = {}
    if liar:
        told = tenants.pop().end()
        stop(leases[1:], 0)
        more = {"told": told, "went_on": run.site.worker_of(tenants[0]) == worker}
    items = tenants[0].result((last - now()) / S + 20)["items"]
    if liar:
        more["after"] = speed(items, alone, end + 2 * S, last)
    return {"alone": speed(items, alone, alone + S // 2, alone + 5 * S // 2), "beside": speed(items, alone, beside, beside + int(c["honest"] * S)),
            "robbed": speed(items, alone, thieves, end), "overruns": gang.said(), "shares": said} | more


def beside_honest(run, gpu, c, tenants, at):
    """Has the second tenant work for a while from a time on, and keep to its turns. The third one, if any, stays, and has no work."""
    loads = c["tenants"][1:]
    new = [Tenant(run.site, gpu, [run.site.share, load], percent, "fixed", "turns") for load, percent in loads]
    tenants += new
    for t in new:
        t.ready(c["starts"][0] - 1)
    new[0].tell(f"{now()} {at} {at + int(c['honest'] * S)}")
    new[0].result((at - now()) / S + c["honest"] + 10)
    stop(new[:1])
    tenants.remove(new[0])


def speed(items, first, a, b):
    """items per second from a to b; the slots of items begin at first"""
    return sum(items[(a - first) // SLOT:(b - first) // SLOT]) * S / (b - a)


def observe(run, gpu, c, tenants):
    """A tenant alone, then beside a lease whose programs, one after the other, ask for sessions of kind observe, which take no turns, and compute in them."""
    (load, percent), (_, rest) = c["tenants"]
    start(run, gpu, [(load, percent)], "best-effort", tenants)
    length, alone = int(c["seconds"] * S), now() + S + S // 10
    thieves = alone + 3 * S + c["starts"][1] * S
    tenants[0].tell(f"{now()} {alone} {thieves + length + S}")
    time.sleep(max(0, alone + 3 * S - now()) / S)
    run.site.change(tenants[0], percent, "fixed")
    script = 'echo ready "$SLUICE_SOCKET"; read -r _; kind=$1; shift; while :; do env LD_PRELOAD="$kind" "$@" </dev/null; echo ended $?; sleep 1; done'
    gang = Tenant(run.site, gpu, ["sh", "-c", script, "observe", run.site.kind2, run.site.thief, "endless"], rest, "fixed", "turns")
    tenants.append(gang)
    gang.ready(c["starts"][1])
    time.sleep(max(0, thieves - now()) / S)
    gang.tell("")
    time.sleep(max(0, thieves + length - now()) / S)
    said = shares(run, tenants)
    stop([gang], 0)
    tenants.remove(gang)
    items = tenants[0].result((thieves + length - now()) / S + 20)["items"]
    ended = [line.split() for line in iter(gang.lines.get, None)]
    return {"alone": speed(items, alone, alone + S // 2, alone + 5 * S // 2), "robbed": speed(items, alone, thieves, thieves + length),
            "computed": sum(w[0] == "ready" for w in ended), "tries": [w[1] for w in ended if w[0] == "ended"],
            "refused": gang.complained(c["refusal"]), "overruns": gang.said(), "shares": [said]}


def vgg(run, gpu, c, tenants):
    """Tasks that begin at the same time, again and again: on the bare GPU or on fractions."""
    program = [run.site.python, run.site.file("vgg.py"), "--batch", str(c["batch"])]
    for percent in c["tenants"]:
        tenants.append(Tenant(run.site, gpu, program, percent, c["policy"], c["how"]))
    for t in tenants:
        t.ready(120)
    repeats = []
    for _ in range(c["times"]):
        at = now() + S // 5
        for t in tenants:
            t.tell(f"{at} {c['images']}", last=False)
        repeats.append([t.result(180, last=False) for t in tenants])
    return {"repeats": repeats}


def many(run, gpu, c, tenants):
    """Small PyTorch programs: one more and more of them, then all at once."""
    program = [run.site.python, run.site.file("many.py")]
    alone = []
    tenants.append(Tenant(run.site, gpu, program, 100, "best-effort", "turns"))
    tenants[0].ready(120)
    begin = now() + S // 10
    tenants[0].tell(f"{begin} {begin + int(c['seconds'] * S)}")
    alone.append(tenants[0].result(60))
    stop(tenants)
    tenants.clear()
    for percent in c["tenants"]:
        tenants.append(Tenant(run.site, gpu, program, percent, c["policy"], "turns"))
    for t in tenants:
        t.ready(240)
    at, spans = now() + S // 2, []
    for n in c["steps"]:
        length = c["all"] if n == len(tenants) else c["seconds"]
        spans.append((n, at, at + int(length * S)))
        at += int((length + c["pause"]) * S)
    for i, t in enumerate(tenants):
        t.tell(" ".join(f"{a} {b}" for n, a, b in spans if i < n))
    said = []
    for _, a, b in spans[-1:]:
        for when in (a + S, b):  # without the first second, in which some have not had a turn yet
            time.sleep(max(0, when - now()) / S)
            said.append(shares(run, tenants))
    results = [t.result((at - now()) / S + 30) for t in tenants]
    return {"alone": alone, "spans": spans, "results": results, "shares": said}


# --- the cells ---

SOLO = 1.5  # s


def base(load, how="turns", seconds=3, warm=1):
    return {"kind": "alone", "cell": f"{load}.{how}", "policy": "best-effort", "how": how, "tenants": [(load, 100)], "warm": warm,
            "windows": 1, "window": seconds, "do": timed, "took": warm + seconds + 3}


def lone(load, hows=("turns", "off", "native"), rounds=80, slots=12):
    """One of several runs: another one has other processes, at other places in memory. In each of many short rounds they are on other
    processors, which for those that are bound by launches makes 10 %."""
    return {"kind": "lone", "cell": load, "policy": "best-effort", "hows": hows, "tenants": [(load, 100)], "rounds": rounds, "slots": slots, "skip": 3,
            "do": abreast, "took": len(hows) * rounds * slots * FINE / S + 6}


def alike(load, percents, rounds=25, one=0.25, together_=1.0):
    n = len(percents)
    return {"kind": "together", "cell": "-".join(str(p) for p in percents) + "." + load, "policy": "best-effort", "tenants": [(load, p) for p in percents],
            "rounds": rounds, "one": one, "all": together_, "rest": 0.05, "skip": [10, 20], "do": together, "took": rounds * (n * one + together_ + 0.05) + 6}


def switch(load, rounds=100):
    return {"kind": "switch", "cell": load, "policy": "best-effort", "tenants": [(load, 100)], "rounds": rounds, "skip": 2, "do": switched,
            "took": 0.2 * rounds + 4}


def mixed(site, loads, percents, policy="fixed", kind="fixed"):
    name = "-".join(str(p) for p in percents) + "." + ("-".join(loads) if len(set(loads)) > 1 else loads[0])
    return {"kind": kind, "cell": name, "policy": policy, "tenants": list(zip(loads, percents)), "warm": site.warm,
            "windows": site.windows, "window": site.window, "solo": SOLO, "do": timed,
            "took": site.warm + site.windows * site.window + 2 * len(loads) * SOLO + 5}


def moving(name, policy, tenants, orders, seconds=10, **more):
    policies = policy if isinstance(policy, list) else [policy] * len(tenants)
    return {"kind": "floors", "cell": name, "policy": policies, "tenants": tenants, "orders": orders, "warm": 2, "windows": 1,
            "window": seconds, "solo": SOLO, "do": timed, "took": seconds + 6 + 2 * SOLO * len(tenants)} | more


def floors():
    yield moving("best-effort", "best-effort", [("gemm", 50), ("mixed", 30), ("copy", 20)], {})
    yield moving("best-effort.leaves", "best-effort", [("gemm", 30), ("gemm", 70)], {1: [("off", 4, 7)]})
    yield moving("best-effort.graph", "best-effort", [("graph", 60), ("mixed", 40)], {})
    yield moving("equal", "equal", [("gemm", 20), ("copy", 50)], {})
    yield moving("equal.arrives", "equal-lend", [("gemm", 20), ("copy", 30), ("graph", 40)], {2: [("off", -2, 3), ("off", 7, 10)]})
    yield moving("lend", ["fixed-lend", "best-effort"], [("gemm", 70), ("gemm", 30)], {0: [("off", 2, 5), ("off", 8, 10)]})
    yield moving("live", "fixed", [("gemm", 50), ("gemm", 30)], {}, change={"at": 4, "tenant": 1, "share": 50})


def kills(times):
    for fates in times * ["client"], times * ["worker"], ["stopped"]:
        for n, which in enumerate(fates):
            order = ("die" if which == "client" else "tell", 1)
            yield {"kind": "kill", "cell": f"{which}.{n + 1}", "policy": "fixed", "fate": which,
                   "tenants": [("gemm", 50), ("gemm", 25), ("small", 25)], "orders": {0: [order]}, "warm": 1, "windows": 1,
                   "window": 4, "do": timed, "took": 8}


def thefts(seconds=10):
    for load, programs in ("endless", 1), ("endless", 8), ("queued", 1), ("queued", 4):
        yield {"kind": "theft", "cell": f"{load}.{programs}", "policy": "fixed", "tenants": [("gemm", 90), ("gemm", 10)], "load": load,
               "programs": programs, "seconds": seconds, "honest": seconds, "starts": (15, 25), "do": theft, "took": 2 * seconds + 50}
    yield {"kind": "theft", "cell": "kind", "policy": "fixed", "tenants": [("gemm", 90), ("gemm", 10)], "load": "kind", "seconds": seconds,
           "starts": (0, 4), "refusal": "not allowed in a session of kind observe", "do": observe, "took": seconds + 12}
    parts = 3
    for part in range(parts):
        yield {"kind": "theft", "cell": f"liar.{part + 1}", "policy": "fixed", "tenants": [("gemm", 85), ("gemm", 10), ("gemm", 5)], "load": "endless",
               "programs": 1, "lies": (part, parts), "seconds": seconds, "honest": 4, "starts": (7, 7), "do": theft, "took": seconds + 29}


def inference(batch, images, repeats):
    for cell, how, percents in (("1.native", "native", [100]), ("2.native", "native", [50, 50]), ("1.whole", "turns", [100]),
                                ("2.halves", "turns", [50, 50])):
        yield {"kind": "vgg", "cell": f"{cell}.batch{batch}", "policy": "fixed", "how": how, "tenants": percents, "batch": batch,
               "images": images, "times": repeats, "do": vgg, "took": 20 + 5 * repeats}


def crowd(policy, percents, steps, seconds=3, length=12, pause=1):
    return {"kind": "many", "cell": f"{len(percents)}.{policy}", "policy": policy, "tenants": percents, "steps": steps,
            "seconds": seconds, "all": length, "pause": pause, "do": many, "took": 60 + len(steps) * (seconds + pause) + length}


UNEQUAL = [9, 5, 2, 2, 5, 2] * 4
# Each load in each mix, beside others.
UNLIKE = {
    (10, 90): (("gemm", "copy"), ("small", "mixed"), ("graph", "gemm")),
    (25, 75): (("copy", "gemm"), ("mixed", "small"), ("gemm", "graph")),
    (30, 70): (("small", "gemm"), ("copy", "graph"), ("mixed", "copy")),
    (50, 50): (("gemm", "mixed"), ("small", "graph"), ("copy", "gemm")),
    (50, 30, 20): (("mixed", "gemm", "small"), ("graph", "copy", "mixed")),
    (25, 25, 25, 25): (("gemm", "copy", "small", "graph"), ("mixed", "copy", "gemm", "mixed")),
}


def plan(run, parts):
    """(cells for whichever GPU is free, and those that come after all others); a list in them stays on one GPU"""
    site, rest, apart = run.site, [], []
    if "many" in parts:  # two dozen programs that start keep all processors busy
        apart += [crowd(policy, UNEQUAL, (1, 2, 4, 8, 16, 24)) for policy in ("fixed", "best-effort")]
    if "vgg" in parts:  # those that are compared one after the other on one GPU
        rest += [[c for c in inference(batch, images, 5) if c["cell"][0] == tasks] for batch, images in ((32, 20121), (1, 2000)) for tasks in "21"]
    if "floors" in parts:
        rest += list(floors())
    if "kill" in parts:
        rest += [list(kills(3))]
    if "theft" in parts:
        rest += list(thefts())
    if "fixed" in parts:
        rest += [mixed(site, [load] * len(mix), mix) for mix in MIXES for load in LOADS]
    if "unlike" in parts:
        rest += [mixed(site, loads, mix) for mix, sets in UNLIKE.items() for loads in sets]
    if "lone" in parts:
        rest += [[lone(load)] for n in range(8) for load in LOADS if n < 2 or load == "small"]
    if "together" in parts:
        rest += [alike("small", mix) for mix in MIXES]
    if "switch" in parts:
        rest += [switch(load) for n in range(4) for load in LOADS if n < 1 or load == "small"]
    if "try" in parts:  # whether all of it works, where there is no GPU
        rest += [[lone("gemm", ("turns", "off"), 4)]
                 + [mixed(site, ("gemm", "gemm"), (30, 70)), next(kills(1))]]
    if "quick" in parts:
        rest += [[base(load, "turns", 1, 0.5) for load in LOADS] + [lone("gemm", rounds=8)]
                 + [mixed(site, ("gemm", "gemm"), (30, 70)), mixed(site, ("small", "graph"), (50, 50))],
                 [moving("lend", ["fixed-lend", "best-effort"], [("gemm", 70), ("gemm", 30)], {0: [("off", 1, 2)]}, 3)]
                 + [c for c in kills(1) if c["fate"] != "stopped"] + [mixed(site, ("mixed", "copy"), (25, 75))],
                 [crowd("fixed", [30, 20, 10], (1, 3), 1, 2, 0.5)],
                 [c | {"images": 640, "times": 1} for c in inference(32, 640, 1) if c["cell"][0] == "2"]]
    return chosen(rest, site.only), chosen(apart, site.only)


def chosen(cells, only):
    """those of which kind.name has a match"""
    out = []
    for c in cells:
        some = [each for each in (c if isinstance(c, list) else [c]) if re.search(only, f"{each['kind']}.{each['cell']}")]
        out += [some] if isinstance(c, list) and some else some
    return out


def work(run, gpu, rest):
    while True:
        with run.lock:
            c = rest.pop(0) if rest else None
        if c is None:
            break
        for each in c if isinstance(c, list) else [c]:
            run.cell(gpu, each)


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    run = Run(Site(sys.argv[1]), sys.argv[2])
    rest, apart = plan(run, sys.argv[3:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for cells in rest, apart:
            threads = [threading.Thread(target=work, args=(run, gpu, cells), daemon=True) for gpu in run.site.gpus]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    finally:
        end_all()


if __name__ == "__main__":
    main()
