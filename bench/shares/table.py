#!/usr/bin/env python3
"""table.py FILE: one table of the cells that run.sh left in FILE.
table.py --page FILE: of those that decided, in Markdown, as docs/shares.md has it.

delivered is a tenant's speed against the same load alone on the GPU; of all is its part
of what all together were delivered; gpu its part of the time by the GPU's own clock, by
turns that ended while we measured, whole: more than 100 where few turns are long.
Errors are in points of the GPU against the nominal share: of the mean, and the worst
of all windows of half a second (sliding) and of a tenth.
"""

import json
import sys

# The cells of docs/shares.md: name, and the loads where a name was used several times.
DECIDING = (
    "driver.50-50 gemm gemm", "driver.50-50 gemm sync", "driver.50-30-20",
    "turns.50-50 gemm gemm", "turns.50-50 gemm copy", "turns.50-50 gemm small", "turns.50-50 gemm sync",
    "turns.30-70 copy gemm", "turns.30-70 graph mixed", "turns.10-90", "turns.25-75", "turns.50-30-20", "turns.4x25",
    "turns.q2000 gemm copy", "turns.q10000 gemm copy", "turns.q10000 copy copy", "turns.q20000 gemm copy",
    "turns.period20", "turns.spin", "turns.futex", "overrun",
    "mps.turns.50-50 gemm gemm", "mps.turns.50-50 gemm sync", "mps.turns.30-70", "mps.turns.10-90",
    "mps.turns.50-30-20", "mps.turns.q1",
    "mps.50-50 gemm gemm", "mps.50-50 gemm copy", "mps.50-50 gemm sync", "mps.30-70 copy gemm", "mps.10-90",
    "green.72.60 gemm gemm", "green.72.60 gemm copy",
    "many.q2", "many.driver",
)


def read(path):
    cells = []
    with open(path) as f:
        for line in f:
            try:
                cells.append(json.loads(line))
            except ValueError:  # cut off when its time was over
                continue
    return cells


def speeds(cells, tell=True):
    """items per second of each kind alone"""
    found = {}
    for c in cells:
        if c["cell"].startswith("alone."):
            t = c["tenants"][0]
            found.setdefault(t["kind"], []).append(sum(t["done"]) / c["secs"])
    for kind, v in sorted(found.items()) if tell else ():
        print(f"alone {kind:6} {sum(v) / len(v):10.0f} items/s, {1e6 / (sum(v) / len(v)):9.1f} us each"
              + (f", spread {100 * (max(v) / min(v) - 1):.1f} %" if len(v) > 1 else ""))
    alone = {k: sum(v) / len(v) for k, v in found.items()}
    if "gemm" in alone:
        alone["burst"] = alone["gemm"]
    return alone


def worst(parts, nominal, slots, step):
    """the largest deviation in points over windows of so many slots of 10 ms"""
    n = len(parts)
    err = 0.0
    for a in range(0, n - slots + 1, step):
        got = 100 * sum(parts[a:a + slots]) / slots
        err = max(err, abs(got - nominal))
    return err


def show(c, alone):
    work = [t for t in c["tenants"] if t["kind"] != "idle"]
    parts = []  # delivered, by 10 ms
    for t in work:
        a = alone.get(t["kind"])
        if not a:
            return
        parts.append([n / (a * 0.01) for n in t["done"]])
    mean = [sum(p) / max(len(p), 1) for p in parts]
    total = sum(mean) or 1
    gap = c.get("gap_us", [0, 0, 0])
    name = c["cell"]
    many = len(work) > 6
    rows = []
    for t, p, m in zip(work, parts, mean):
        gpu = t.get("stamp_ms", 0) / 10 / c["secs"]
        rows.append((t, p, m, gpu))
    if many:  # one row for each kind and share
        grouped = {}
        for r in rows:
            grouped.setdefault((r[0]["kind"], r[0]["percent"]), []).append(r)
    else:
        grouped = {i: [r] for i, r in enumerate(rows)}
    for group in grouped.values():
        t = group[0][0]
        nominal = t["percent"]
        n = len(group)
        m = sum(r[2] for r in group) / n
        err = max(abs(100 * r[2] - nominal) for r in group)
        w500 = max(worst(r[1], nominal, 50, 10) for r in group)
        w100 = max(worst(r[1], nominal, 10, 10) for r in group)
        # In the log of the first run the nanoseconds are called lat_us.
        lat = [ns / 1e3 for ns in t.get("lat_ns", t.get("lat_us", [0, 0, 0, 0]))]
        label = t["kind"] + (f" x{n}" if n > 1 else "")
        print(f"{name:18.18} {label:9} {nominal:5.1f} {100 * m:7.2f} {100 * m / total:7.2f} "
              f"{sum(r[3] for r in group) / n:6.2f} {err:6.2f} {w500:6.2f} {w100:6.2f} "
              f"{100 * total:7.1f} {gap[1]:7.1f} {gap[2]:7.1f} "
              f"{t.get('over_us', [0, 0])[0]:8.1f} {t.get('over_us', [0, 0])[1]:8.1f} {t.get('max_gap_ms', 0):8.2f} "
              + (f"{lat[0]:.1f}/{lat[2]:.1f}/{lat[3]:.1f}" if lat[3] else "-"))
        name = ""


def page(cells, alone):
    """The deciding cells, one row each. A star: somebody's items were thought twice as long as they are, or more."""
    print("| cell | tenants and their percent | delivered, % of one alone | in all, % | off, points: mean, 0.5 s "
          "| hand-over us: p50, p90 | longest gap ms |")
    print("|---|---|---|---|---|---|---|")
    rows = {}
    for c in cells:
        kinds = " ".join(t["kind"] for t in c["tenants"])
        for key in (c["cell"], f"{c['cell']} {kinds}"):
            rows.setdefault(key, c)  # of two runs alike the first
    for key in DECIDING:
        c = rows[key]
        total = 0
        groups = {}  # tenants alike are one entry where there are many
        for i, t in enumerate(c["tenants"]):
            part = [n / (alone[t["kind"]] * 0.01) for n in t["done"]]
            total += sum(part) / len(part)
            groups.setdefault((t["kind"], t["percent"]) if len(c["tenants"]) > 6 else i, []).append((t, part))
        who, got, off, half = [], [], 0, 0
        for group in groups.values():
            due = group[0][0]["percent"]
            who.append((f"{len(group)} x " if len(group) > 1 else "") + f"{group[0][0]['kind']} {due:.3g}")
            means = [100 * sum(p) / len(p) for _, p in group]
            got.append(f"{sum(means) / len(means):.1f}")
            off = max([off] + [abs(m - due) for m in means])
            half = max([half] + [worst(p, due, 50, 10) for _, p in group])
        frozen = c.get("turns") and any(t["est_us"] > 2e6 / alone[t["kind"]] for t in c["tenants"])
        star = " \\*" if frozen else ""
        gap = c.get("gap_us", [0, 0, 0])
        hand_over = f"{gap[1]:.0f}, {gap[2]:.0f}" if gap[2] else "-"
        longest = max(t.get("max_gap_ms", 0) for t in c["tenants"])
        print(f"| `{c['cell']}`{star} | {', '.join(who)} | {', '.join(got)} | {100 * total:.1f} "
              f"| {off:.2f}, {half:.2f} | {hand_over} | {f'{longest:.1f}' if longest else '-'} |")


def main():
    if sys.argv[1] == "--page":
        cells = read(sys.argv[2])
        page(cells, speeds(cells, tell=False))
        return
    cells = read(sys.argv[1])
    alone = speeds(cells)
    print(f"\n{'':18} {'':9} {'':5} {'deliv-':>7} {'of':>7} {'gpu':>6} {'error, points':^20} {'all to-':>7} "
          f"{'hand-over us':^15} {'past deadline us':^17} {'longest':>8} latency us")
    print(f"{'cell':18} {'load':9} {'nom.':>5} {'ered %':>7} {'all %':>7} {'%':>6} {'mean':>6} {'0.5 s':>6} {'0.1 s':>6} "
          f"{'gether%':>7} {'p50':>7} {'p90':>7} {'mean':>8} {'max':>8} {'gap ms':>8} p50/p99/max")
    for c in cells:
        if not c["cell"].startswith(("alone.", "heat")):
            show(c, alone)


if __name__ == "__main__":
    main()
