"""Rates of copies from a raw log of gpu-copies.sh.

copies.py LOG           lines for a terminal, and what misses a bar. Exit status 1 if something does
copies.py --page LOG    the tables of docs/benchmarks.md

Rates are GB/s, the median of five repeats with the least and the greatest. The log may hold several runs.
"""

import sys

import rawlog

PLACES = {"native": "native", "loopback": "loopback TCP", "unix": "Unix socket"}
LARGE = 64 << 20
NETWORK = 12  # GB/s that large pinned copies reach over loopback TCP, what 100 Gb/s carry
LOCAL = 0.9  # of native that they reach on the GPU's own node


def runs(log):
    """For each run its header and {(memory, direction, bytes): {place: line}}."""
    found = []
    for head, lines in rawlog.sections(log):
        rows = {}
        for line in lines:
            rows.setdefault((line["memory"], line["direction"], line["bytes"]), {})[line["place"]] = line
        found.append((head, rows))
    return found


def size(n):
    return f"{n >> 30} GiB" if n >> 30 else f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB"


def cell(at, place):
    if place not in at:
        return ""
    r = at[place]
    ratio = f", {r['gb_s'] / at['native']['gb_s']:.2f}" if place != "native" and "native" in at else ""
    return f"{r['gb_s']:.2f} ({r['least']:.2f} to {r['greatest']:.2f}){ratio}"


def missed(key, at):
    """What a row's bars say, for each that it misses."""
    memory, direction, n = key
    if memory != "pinned" or n < LARGE:
        return
    if "loopback" in at and at["loopback"]["gb_s"] < NETWORK:
        yield f"pinned {direction} {size(n)} over loopback TCP: {at['loopback']['gb_s']:.2f} GB/s, wanted {NETWORK}"
    if "unix" in at and "native" in at and at["unix"]["gb_s"] < LOCAL * at["native"]["gb_s"]:
        yield f"pinned {direction} {size(n)} over a Unix socket: {at['unix']['gb_s'] / at['native']['gb_s']:.2f} of native, wanted {LOCAL}"


def page(log):
    for head, rows in runs(log):
        places = [p for p in PLACES if any(p in at for at in rows.values())]
        print(f"{head['gpu']}, driver {head['driver']}, commit {head['commit']}, {head['date'][:10]}.\n")
        print("| memory | copy | bytes | " + " | ".join(PLACES[p] for p in places) + " |")
        print("|---|---|---|" + "---|" * len(places))
        for (memory, direction, n), at in rows.items():
            way = "to the device" if direction == "h2d" else "from the device"
            print(f"| {memory} | {way} | {size(n)} | " + " | ".join(cell(at, p) for p in places) + " |")
        print()


def text(log):
    bad = []
    for _, rows in runs(log):
        for key, at in rows.items():
            memory, direction, n = key
            print(f"{memory:8} {direction} {size(n):>8}  " + "   ".join(f"{PLACES[p]} {cell(at, p)}, {at[p]['us']:.1f} us" for p in PLACES if p in at))
            bad += missed(key, at)
    for line in bad:
        print(f"FAIL {line}")
    return bool(bad)


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--page":
        page(sys.argv[2])
    elif len(sys.argv) == 2:
        sys.exit(text(sys.argv[1]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
