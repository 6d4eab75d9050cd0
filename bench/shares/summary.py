#!/usr/bin/env python3
"""summary.py FILE...: judges the raw lines of gpu-shares.sh; a table for each kind of cell, PASS or FAIL for each bar.
summary.py --page FILE...: the same as Markdown, for docs/shares.md.

Delivered is a tenant's items against what it did alone on that GPU, through the same path: the same process just
before and after (solo), else the mean of the same load's runs. Errors are in points of the GPU: delivered less the
percent asked. A load that is bound by launches has the speed of a processor, not of the GPU, and that differs from
second to second, on the bare GPU too: its error is that of the time it held the GPU, what it is delivered in all is
judged where each tenant was alone again and again (together), and a lone one by turns switched on and off within its
process (switch). Other lone tenants are compared with those that worked by turns with them. Exit status 0 when all bars hold.
"""

import sys
from math import nan
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rawlog

MEAN, WINDOW, ALL, LONE = 1.0, 2.0, 0.95, 0.99  # the bars: points, points, parts of unshared
FLOOR_POINTS, FLOOR_SECONDS = 2.0, 1.0
GAP_MS = 100
HALVES = 0.97
ROBBED, STOLEN = 0.95, 1.0  # of its share, what a tenant keeps beside thieves; points that those have beyond theirs
JUDGED = "batch32"  # one image at a time keeps no GPU busy: it is shown beside
SLOT = 0.1  # s
LAUNCHES = {"small"}  # loads bound by launches


def ratio_of(part, whole):
    """part / whole; of a whole that did nothing, not a number, which holds no bar."""
    return part / whole if whole else nan


def centile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share / 100 * len(values)))] if values else 0


class Page:
    """What is printed, as text or Markdown, and what was passed and failed."""

    def __init__(self, markdown):
        self.markdown, self.passed, self.failed, self.names = markdown, 0, 0, []

    def title(self, text):
        print(f"\n### {text}\n" if self.markdown else f"\n== {text}")

    def table(self, head, rows):
        rows = [[str(c) for c in r] for r in rows]
        if self.markdown:
            print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
            for r in rows:
                print("| " + " | ".join(r) + " |")
            return
        wide = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
        for r in [head, *rows]:
            print("  ".join(c.ljust(w) for c, w in zip(r, wide)).rstrip())

    def judge(self, name, good, text):
        self.passed, self.failed = self.passed + bool(good), self.failed + (not good)
        if not good:
            self.names.append(name)
        if not self.markdown:
            print(f"{'PASS' if good else 'FAIL'} {name:28} {text}")
        return "" if good else "**missed**" if self.markdown else "FAIL"


class Alone:
    """Items in a second of each load alone, by GPU and path."""

    def __init__(self, cells):
        self.runs = {}
        for c in cells:
            if c["kind"] == "alone" and "results" in c:
                r = c["results"][0]
                self.runs.setdefault((r["load"], c["how"]), []).append((c["gpu"], mean(r["items"]) / SLOT))
            for how, speeds in c.get("speeds", {}).items():
                self.runs.setdefault((c["load"], how), []).append((c["gpu"], mean(speeds)))

    def of(self, load, gpu, how="turns"):
        runs = self.runs.get((load, how), [])
        here = [v for g, v in runs if g == gpu] or [v for _, v in runs]
        return mean(here) if here else 0


def delivered(c, alone):
    """percent of the GPU that each tenant was delivered, by slots of 0.1 s; None for one that left nothing"""
    out = []
    for r in c["results"]:
        speed = (r.get("alone") or alone.of(r["load"], c["gpu"])) if r else 0
        out.append([100 * n / (speed * SLOT) for n in r["items"]] if speed else None)
    return out


def held(c, first=0, last=-1):
    """percent of the time that each tenant held the GPU, by the daemon's count, over all windows or from one of its counts to another;
    None where it does not say"""
    if len(c.get("shares", [])) < 2:
        return None
    a, b = c["shares"][first], c["shares"][last]
    out = []
    for x, y in zip(a["of"], b["of"]):
        try:
            out.append(100 * (y["shares"][0]["held"] - x["shares"][0]["held"]) / (b["at"] - a["at"]))
        except (TypeError, KeyError, IndexError):
            return None
    return out


def revoked(c):
    """turns that were taken away from the tenants while they were measured, - where the daemon does not say"""
    try:
        a, b = c["shares"][0]["of"], c["shares"][-1]["of"]
        return sum(y["shares"][0]["revoked"] - x["shares"][0]["revoked"] for x, y in zip(a, b))
    except (TypeError, KeyError, IndexError):
        return "-"


def numbers(values, form="{:.1f}"):
    return ", ".join("-" if v is None else form.format(v) for v in values)


def label(c):
    return ", ".join(f"{load} {percent}" for load, percent in c["tenants"])


def jackknife(n, of):
    """of(k) for all rounds but k, of(None) for all of them: (the latter, its standard error)"""
    parts = [of(k) for k in range(n)]
    middle = mean(parts)
    return of(None), ((n - 1) / n * sum((p - middle) ** 2 for p in parts)) ** 0.5


def over(a, b, without):
    """the sum of a against the sum of b, but for one of their rounds"""
    return ratio_of(sum(v for k, v in enumerate(a) if k != without), sum(v for k, v in enumerate(b) if k != without))


def show_switch(page, cells):
    """turns on and off within one process; answers which loads were judged by that"""
    loads = {}
    for c in cells:
        if c["kind"] == "switch" and "on" in c:
            loads.setdefault(c["load"], []).append(c)
    if not loads:
        return loads
    page.title("A lone tenant, best effort: turns switched on and off within its process, by tenths of a second")
    rows = []
    for load, runs in sorted(loads.items()):
        on, off = ([v for r in runs for v in r[k]] for k in ("on", "off"))
        ratio, error = jackknife(len(on), lambda k, on=on, off=off: over(on, off, k))
        of_runs = [over(r["on"], r["off"], None) for r in runs]
        met = page.judge(f"switch.{load}", ratio >= LONE, f"{ratio:.4f} of no turns, +- {error:.4f}, wanted {LONE}; by runs {numbers(of_runs, '{:.4f}')}")
        rows.append([load, f"{len(runs)} x {len(runs[0]['on'])}", f"{mean(on):.0f}", f"{mean(off):.0f}", f"{ratio:.4f}", f"{error:.4f}",
                     numbers(of_runs, "{:.4f}"), met])
    page.table(["load", "runs, rounds", "items/s with turns", "without", "of without", "standard error", "by runs", ""], rows)
    return loads


def show_together(page, cells):
    cells = [c for c in cells if c["kind"] == "together" and "shared" in c]
    if not cells:
        return
    page.title("Launch-bound tenants together, best effort, against each of them alone in turn")
    rows = []
    for c in sorted(cells, key=lambda c: (len(c["tenants"]), c["cell"])):
        def total(k, c=c):
            return sum(over(s, a, k) for s, a in zip(c["shared"], c["alone"]))
        ratio, error = jackknife(len(c["alone"][0]), total)
        each = [100 * over(s, a, None) for s, a in zip(c["shared"], c["alone"])]
        met = page.judge(f"together.{c['cell']}", ratio >= ALL, f"{numbers(each, '{:.2f}')}: in all {ratio:.3f} +- {error:.3f}, wanted {ALL}")
        rows.append([label(c), c["gpu"], len(c["alone"][0]), numbers([mean(a) for a in c["alone"]], "{:.0f}"), numbers(each, "{:.2f}"), f"{ratio:.3f}",
                     f"{error:.3f}", met])
    page.table(["tenants and their percent", "GPU", "rounds", "items/s alone", "delivered, %", "in all", "standard error", ""], rows)


def show_lone(page, cells):
    switched = show_switch(page, cells)
    loads = {}
    for c in cells:
        if c["kind"] == "lone" and "speeds" in c:
            loads.setdefault(c["load"], []).append(c["speeds"])
    if not loads:
        return
    page.title("A lone tenant, best effort: with turns, without, and on the bare GPU")
    rows = []
    for load, runs in sorted(loads.items()):
        speed = {how: mean(v for r in runs for v in r[how]) for how in runs[0]}
        ratio = ratio_of(speed["turns"], speed["off"])
        of_runs = [ratio_of(mean(r["turns"]), mean(r["off"])) for r in runs]
        rounds = [x / y for r in runs for x, y in zip(r["turns"], r["off"]) if y]
        native = speed.get("native")
        met = ""
        if load not in LAUNCHES or load not in switched:
            met = page.judge(f"lone.{load}", ratio >= LONE, f"{ratio:.4f} of no turns, wanted {LONE}; by runs {numbers(of_runs, '{:.4f}')}")
        rows.append([load, f"{len(runs)} x {len(runs[0]['turns'])}", f"{speed['turns']:.0f}", f"{speed['off']:.0f}", f"{native:.0f}" if native else "-",
                     f"{ratio:.4f}", f"{min(of_runs):.4f} to {max(of_runs):.4f}", f"{centile(rounds, 10):.3f} to {centile(rounds, 90):.3f}",
                     f"{speed['turns'] / native:.3f}" if native else "-", met])
    page.table(["load", "runs, rounds", "items/s with turns", "without", "bare GPU", "of without", "by runs", "by rounds, p10 to p90", "of bare", ""], rows)


def show_fixed(page, cells, alone):
    cells = [c for c in cells if c["kind"] == "fixed" and "results" in c]
    if not cells:
        return
    page.title("Fixed percentages")
    rows = []
    for c in sorted(cells, key=lambda c: (len(c["tenants"]), c["cell"])):
        each, n = delivered(c, alone), round(c["window"] / SLOT)
        if None in each:
            page.judge(f"fixed.{c['cell']}", False, "a load of it was not run alone")
            continue
        windows = [[mean(d[a:a + n]) for a in range(0, len(d) - n + 1, n)] for d in each]
        means = [mean(w) for w in windows]
        judged = [list(w) for w in windows]
        for i, (load, _) in enumerate(c["tenants"]):
            if load in LAUNCHES:
                judged[i] = [(held(c, k, k + 1) or [-100] * len(each))[i] for k in range(len(windows[i]))]
        off = max(abs(mean(w) - p) for w, (_, p) in zip(judged, c["tenants"]))
        worst = max(abs(v - p) for w, (_, p) in zip(judged, c["tenants"]) for v in w)
        counted = [i for i, (load, _) in enumerate(c["tenants"]) if load not in LAUNCHES]
        total = sum(means[i] for i in counted or range(len(means))) / sum(c["tenants"][i][1] for i in counted or range(len(means)))
        gaps = [max(r["gap_us"]) / 1e3 for r in c["results"]]
        good = off <= MEAN and worst <= WINDOW and (total >= ALL or not counted)
        met = page.judge(f"fixed.{c['cell']}", good, f"{numbers(means, '{:.2f}')}: off {off:.2f} in the mean, {worst:.2f} in a window; in all {total:.3f}")
        rows.append([label(c), c["gpu"], len(windows[0]), numbers(means, "{:.2f}"), numbers(held(c) or [None], "{:.2f}"), f"{off:.2f}", f"{worst:.2f}",
                     f"{total:.3f}", f"{max(gaps):.0f}", revoked(c), met])
    page.table(["tenants and their percent", "GPU", "windows", "delivered, %", "held, %", "off, points: mean", "worst window", "in all",
                "longest gap ms", "turns revoked", ""], rows)


def show_theft(page, cells):
    """What a tenant was delivered beside one that keeps to its turns, and beside one that does not. The points that it lost by that are what was stolen."""
    cells = [c for c in cells if c["kind"] == "theft" and "robbed" in c]
    show_thieves(page, [c for c in cells if "beside" in c and "told" not in c])
    show_liars(page, [c for c in cells if "told" in c])
    show_observers(page, [c for c in cells if "tries" in c])


def show_thieves(page, cells):
    if not cells:
        return
    page.title("A tenant of 90 % beside programs of a lease of 10 % whose work outlasts their turns, over 10 s")
    rows = []
    for c in cells:
        beside, robbed, stolen, good = stolen_in(c)
        met = page.judge(f"theft.{c['cell']}", good, said_of(c, beside, robbed))
        rows.append([f"{c['programs']} x {c['load']}", c["gpu"], f"{beside:.2f}", f"{robbed:.2f}", f"{stolen:.2f}", met])
    page.table(["programs", "GPU", "delivered beside an honest tenant, %", "beside thieves, %", "the thieves had, %", ""], rows)


def stolen_in(c):
    """(percent delivered beside an honest tenant, percent delivered beside thieves, percent that these had, whether that is within the bars)"""
    (_, percent), (_, rest) = c["tenants"][:2]
    beside, robbed = (100 * ratio_of(c[k], c["alone"]) for k in ("beside", "robbed"))
    stolen = rest + beside - robbed
    return beside, robbed, stolen, robbed >= ROBBED * percent and stolen <= rest + STOLEN


def said_of(c, beside, robbed):
    load, percent = c["tenants"][0]
    return (f"{load} of {percent} %: {robbed:.2f} % delivered beside thieves, {beside:.2f} % beside a tenant "
            f"that keeps to its turns; wanted {ROBBED * percent:.1f} %, and less than {STOLEN} points less")


def show_liars(page, cells):
    """The same with a session that was taken over. The thieves have overrun, or the lies had nothing to help; the tenant's own session has to go on."""
    if not cells:
        return
    page.title("A tenant of 85 % beside a program of a lease of 10 % whose work outlasts its turns, while a session of a third lease writes lies into the schedule")
    rows = []
    for c in cells:
        beside, robbed, stolen, good = stolen_in(c)
        percent, after = c["tenants"][0][1], 100 * ratio_of(c["after"], c["alone"])
        overruns = max(s["overruns"] for at in c["shares"] for s in at["of"][-1]["shares"] or [{"overruns": 0}])
        good = good and overruns > 0 and c["went_on"] and after >= ROBBED * percent
        met = page.judge(f"theft.{c['cell']}", good, f"{said_of(c, beside, robbed)}; {after:.2f} % after the liar; {overruns} overruns; "
                         f"its session {'goes on' if c['went_on'] else 'has ended'}")
        rows.append(["; ".join(c["told"]), c["gpu"], f"{beside:.2f}", f"{robbed:.2f}", f"{stolen:.2f}", f"{after:.2f}", met])
    page.table(["lies, half a second each, again and again for 10 s", "GPU", "delivered beside an honest tenant, %", "beside thief and liar, %", "the thief had, %",
                "delivered after both, %", ""], rows)


def show_observers(page, cells):
    """Programs in sessions of kind observe, each of which has to be refused."""
    if not cells:
        return
    page.title("A tenant of 90 % beside programs of a lease of 10 % that ask for sessions of kind observe, which take no turns, and compute in them, over 10 s")
    rows = []
    for c in cells:
        percent, robbed = c["tenants"][0][1], 100 * ratio_of(c["robbed"], c["alone"])
        tries, failed = len(c["tries"]), sum(status != "0" for status in c["tries"])
        good = robbed >= ROBBED * percent and not c["computed"] and 0 < tries == failed <= c["refused"]
        met = page.judge(f"theft.{c['cell']}", good, f"{tries} programs, {c['refused']} times \"{c['refusal']}\", {c['computed']} of them computed; "
                         f"{robbed:.2f} % delivered beside them, wanted {ROBBED * percent:.1f} %")
        rows.append([tries, c["refused"], c["computed"], c["gpu"], f"{robbed:.2f}", met])
    page.table(["programs", "refused", "computed", "GPU", "delivered beside them, %", ""], rows)


def below(parts, floor):
    """s of the longest stretch in which a tenant was delivered less than its floor, both by slots; over three
    slots each, because in one of them it has a turn more or a turn less"""
    longest = run = 0
    for i in range(1, len(parts) - 1):
        run = run + 1 if sum(parts[i - 1:i + 2]) < sum(floor[i - 1:i + 2]) else 0
        longest = max(longest, run)
    return longest * SLOT


def on(c, i, slot):
    """whether tenant i had work in all of that slot"""
    a, b = slot * SLOT, (slot + 1) * SLOT
    orders = c.get("orders", {}).get(str(i), [])
    return not any(o[0] == "off" and a < o[2] and b > o[1] for o in orders)


def floors_of(c, slots):
    """each tenant's floor in percent, by slots: its percent of best effort, its part of those present if equal"""
    policies = c["policy"] if isinstance(c["policy"], list) else [c["policy"]] * len(c["tenants"])
    out = []
    for i, (_, percent) in enumerate(c["tenants"]):
        floor = []
        for s in range(slots):
            active = [k for k in range(len(policies)) if on(c, k, s)]
            change = c.get("change")
            share = percent
            if change and change["tenant"] == i and s * SLOT >= change["at"]:
                share = change["share"]
            if not on(c, i, s):
                floor.append(0)
            elif policies[i].startswith("equal"):
                floor.append(100 / max(len(active if policies[i] == "equal-lend" else policies), 1))
            elif policies[i] == "best-effort" and "fixed-lend" not in policies:
                floor.append(100 * share / sum(c["tenants"][k][1] for k in active))
            elif policies[i] == "best-effort" and not on(c, 0, s):
                floor.append(95)  # what was lent, all but what the hand-overs take
            else:
                floor.append(share)
        out.append(floor)
    return out


def show_floors(page, cells, alone):
    cells = [c for c in cells if c["kind"] == "floors" and "results" in c]
    if not cells:
        return
    page.title("Best effort, equal, lending, live change")
    rows = []
    for c in cells:
        each = delivered(c, alone)
        if None in each:
            page.judge(c["cell"], False, "a load of it was not run alone")
            continue
        floors = floors_of(c, len(each[0]))
        longest = [below(d, [max(f - FLOOR_POINTS, 0) for f in fl]) for d, fl in zip(each, floors)]
        total = mean(sum(d[s] for d in each) for s in range(len(each[0]))) / 100
        good = max(longest) <= FLOOR_SECONDS
        text = f"{numbers([mean(d) for d in each], '{:.1f}')}; below the floor for {numbers(longest)} s at most; in all {total:.3f}"
        if c["cell"] != "live":  # which leaves time to nobody at first
            good = good and total >= ALL
        met = page.judge(f"floor.{c['cell']}", good, text)
        policies = c["policy"] if isinstance(c["policy"], str) else ", ".join(c["policy"])
        rows.append([c["cell"], label(c), policies, numbers([mean(f) for f in floors]), numbers([mean(d) for d in each]), numbers(longest), f"{total:.3f}", met])
    page.table(["cell", "tenants and their percent", "policy", "floor, mean %", "delivered, %", "below it for, s", "in all", ""], rows)


def show_kill(page, cells, alone):
    cells = [c for c in cells if c["kind"] == "kill" and "results" in c]
    if not cells:
        return
    page.title("A tenant of 50 % ends in its own turn, beside two of 25 %")
    rows = []
    for c in cells:
        at, before, after = (c["victim"]["at"] - c["measure"]) / 1e9, [], []
        slot = int(at / SLOT)
        for r in c["results"][1:]:
            before.append(max(r["gap_us"][2:slot]) / 1e3 if slot > 2 else 0)
            after.append(max(r["gap_us"][slot:]) / 1e3 if sum(r["items"][slot + 1:]) else 1e6)
        met = page.judge(f"kill.{c['cell']}", max(after) < GAP_MS, f"longest gap of the others {numbers(after)} ms, before it {numbers(before)}")
        rows.append([c["cell"].split(".")[0], f"{at:.2f}", numbers(before), numbers(after), met])
    page.table(["what ended", "at s", "longest gap of the others before, ms", "after, ms", ""], rows)


def show_vgg(page, cells):
    cells = [c for c in cells if c["kind"] == "vgg" and "repeats" in c]
    if not cells:
        return
    page.title("Inference with VGG-16")
    rows, rates = [], {}
    for c in cells:
        speed = [sum(t["images"] for t in r) / ((max(t["ended"] for t in r) - min(t["began"] for t in r)) / 1e9) for r in c["repeats"]]
        seconds = [(t["ended"] - t["began"]) / 1e9 for r in c["repeats"] for t in r]
        rates[c["cell"]] = median(speed)
        spread = (max(speed) - min(speed)) / median(speed)
        rows.append([c["cell"], len(c["tenants"]), c["how"], c["batch"], c["repeats"][0][0]["images"], len(speed), f"{mean(seconds):.2f}",
                     f"{median(speed):.0f}", f"{100 * spread:.1f} %"])
    page.table(["case", "tasks", "path", "batch", "images each", "repeats", "s for a task", "images/s, all", "spread"], rows)
    for name in [n for n in rates if n.startswith("2.halves")]:
        batch = name.split(".")[-1]
        native, one, whole = (rates.get(f"{n}.{batch}") for n in ("2.native", "1.native", "1.whole"))
        if not native:
            continue
        text = f"two halves {rates[name]:.0f} images/s, two tasks on the bare GPU {native:.0f}: {rates[name] / native:.3f}, wanted {HALVES}"
        if whole and one:
            text += f"; one task {whole / one:.3f}"
        if batch == JUDGED:
            page.judge(f"vgg.{batch}", rates[name] / native >= HALVES, text)
        if page.markdown or batch != JUDGED:
            print(f"\n{batch}: {text}.")


def steps_in(span, begin, end):
    """steps per second of one tenant in part of a span; what was under way at its edges counts in part"""
    done, last = 0.0, 0.0
    for at in span["at_us"]:
        t = span["begin"] + at * 1000
        got = min(t, end) - max(span["begin"] + last * 1000, begin)
        whole = t - (span["begin"] + last * 1000)
        if got > 0 and whole > 0:
            done += span["steps"] * got / whole
        last = at
    return done / ((end - begin) / 1e9)


def show_many(page, cells):
    cells = [c for c in cells if c["kind"] == "many" and "results" in c]
    for c in cells:
        page.title(f"{len(c['tenants'])} PyTorch programs, {c['policy']}")
        one = c["alone"][0]["spans"][0]
        speed = steps_in(one, one["begin"] + 500_000_000, one["end"])
        n, a, b = c["spans"][-1]
        daemon = held(c)
        got = [100 * steps_in(r["spans"][-1], a + 1_000_000_000, b) / speed for r in c["results"]]
        rows, good = [], True
        for percent in sorted(set(c["tenants"])):
            those = [i for i, p in enumerate(c["tenants"]) if p == percent]
            off = max(abs(got[i] - percent) for i in those)
            time = numbers([min(daemon[i] for i in those), max(daemon[i] for i in those)], "{:.2f}") if daemon else "-"
            memory = [c["results"][i]["memory"] for i in those]
            caps = sum(m["given"] and m["refused"] for m in memory)
            rows.append([f"{len(those)} x {percent}", numbers([min(got[i] for i in those), max(got[i] for i in those)], "{:.2f}"), f"{off:.2f}", time,
                         f"{memory[0]['total'] >> 20}", f"{caps} of {len(those)}"])
            good = good and off <= WINDOW and caps == len(those)
        page.table(["tenants, percent", "delivered, %: least, most", "off, points", "held, %: least, most", "memory, MiB", "cap held"], rows)
        total = sum(got) / 100
        page.judge(f"many.{c['cell']}", good, f"all {len(got)} finished; in all {total:.3f} of one alone")
        rows = []
        for k, (n, a, b) in enumerate(c["spans"]):
            lat = []
            for i, r in enumerate(c["results"][:n]):  # a tenant has the spans in which it was at work
                lat += r["spans"][sum(i < m for m, _, _ in c["spans"][:k])]["latency_us"]
            rows.append([n, len(lat), *(f"{centile(lat, p):.1f}" for p in (50, 90, 99)), f"{max(lat or [0]):.1f}"])
        lat = one["latency_us"]
        rows.insert(0, ["1, whole GPU", len(lat), *(f"{centile(lat, p):.1f}" for p in (50, 90, 99)), f"{max(lat):.1f}"])
        print()
        page.table(["tenants at work", "launches tried", "launch to end, us: p50", "p90", "p99", "most"], rows)


def show_alone(page, alone):
    page.title("Each load alone, through the same path")
    rows = []
    for (load, how), runs in sorted(alone.runs.items()):
        by = {}
        for g, v in runs:
            by.setdefault(g, []).append(v)
        rows.append([load, how, numbers([mean(v) for _, v in sorted(by.items())], "{:.0f}"), f"{ratio_of(1e6, mean(v for _, v in runs)):.1f}",
                     f"{100 * max(ratio_of(max(v), min(v)) - 1 for v in by.values()):.1f} %"])
    page.table(["load", "path", "items/s by GPU", "us an item", "spread on one GPU"], rows)


def show_origin(parts, cells):
    """where each cell was measured"""
    print("```")
    for header, part in parts:
        print(*rawlog.text(header), sep="\n")
        for kind in dict.fromkeys(c["kind"] for c in part):
            here = [c["cell"] for c in part if c["kind"] == kind]
            every = len(here) == sum(c["kind"] == kind for c in cells)
            names = " ".join(dict.fromkeys(here))
            print(f"    {kind}: {'all' if every else names}")
    print("```")


def main():
    markdown = "--page" in sys.argv
    logs = [a for a in sys.argv[1:] if a != "--page"]
    parts = [part for log in logs for part in rawlog.sections(log)]
    cells = [c for _, part in parts for c in part]
    if not cells:
        sys.exit("summary: no cells")
    page = Page(markdown)
    if markdown:
        show_origin(parts, cells)
    alone = Alone(cells)
    if alone.runs:
        show_alone(page, alone)
    show_lone(page, cells)
    show_fixed(page, cells, alone)
    show_together(page, cells)
    show_floors(page, cells, alone)
    show_kill(page, cells, alone)
    show_theft(page, cells)
    show_vgg(page, cells)
    show_many(page, cells)
    broken = [c for c in cells if "error" in c]
    if broken:
        page.title("Not run, or failed")
    for c in broken:
        page.judge(f"{c['kind']}.{c['cell']}", False, c["error"])
        if markdown:
            print(f"- `{c['kind']}.{c['cell']}`: {c['error']}")
    print(f"\n{page.passed} of {page.passed + page.failed} bars held" + (f"; missed: {' '.join(page.names)}" if page.names else ""))
    sys.exit(1 if page.failed and not markdown else 0)


if __name__ == "__main__":
    main()
