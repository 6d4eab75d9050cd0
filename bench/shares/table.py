#!/usr/bin/env python3
"""table.py FILE: one table of the cells that run.sh left in FILE.

delivered is a tenant's speed against the same load alone on the GPU; of all is its part
of what all together were delivered; gpu its part of the time by the GPU's own clock.
Errors are in points of the GPU against the nominal share: of the mean, and the worst
of all windows of half a second (sliding) and of a tenth.
"""

import json
import sys


def read(path):
    cells = []
    with open(path) as f:
        for line in f:
            try:
                cells.append(json.loads(line))
            except ValueError:  # cut off when its time was over
                continue
    return cells


def speeds(cells):
    """items per second of each kind alone"""
    found = {}
    for c in cells:
        if c["cell"].startswith("alone."):
            t = c["tenants"][0]
            found.setdefault(t["kind"], []).append(sum(t["done"]) / c["secs"])
    for kind, v in sorted(found.items()):
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
        lat = t.get("lat_us", [0, 0, 0, 0])
        label = t["kind"] + (f" x{n}" if n > 1 else "")
        print(f"{name:18.18} {label:9} {nominal:5.1f} {100 * m:7.2f} {100 * m / total:7.2f} "
              f"{sum(r[3] for r in group) / n:6.2f} {err:6.2f} {w500:6.2f} {w100:6.2f} "
              f"{100 * total:7.1f} {gap[1]:7.1f} {gap[2]:7.1f} "
              f"{t.get('over_us', [0, 0])[0]:8.1f} {t.get('over_us', [0, 0])[1]:8.1f} {t.get('max_gap_ms', 0):8.2f} "
              + (f"{lat[0]:.0f}/{lat[2]:.0f}/{lat[3]:.0f}" if lat[3] else "-"))
        name = ""


def main():
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
