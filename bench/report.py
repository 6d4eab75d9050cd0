"""Makes the blocks of README.md and docs/ that have figures, or lines for a terminal, from raw logs (rawlog.py).

report.py gpu LOG               the tables of docs/benchmarks.md, of gpu-bench.sh's log
report.py daemon LOG            its part on the daemons, of daemon/test/bench's log
report.py slurm LOG             its part on jobs, of the log of TestCost in test/slurm/faults
report.py summary LOG LOG       what README.md says, of the logs of gpu-bench.sh and daemon/test/bench
report.py container LOG         what docs/containers.md says, of gpu-container.sh's log
report.py --text [--part NAME] gpu LOG        one line per program and link
report.py --text daemon LOG                   one line per figure of the daemons

pages.py puts the blocks into the pages. A log of gpu-bench.sh has a line for each run, PART.VARIANT.RUN: what the
program printed, and what the shim counted, by process. Run "short" differs from run 1 in its number of steps alone, so
their difference is that of the steps alone. The other logs in JSON have a line for each figure, with every sample.
"""

import argparse
import math
import re
import statistics
import sys
from pathlib import Path

import rawlog

LINKS = {
    "loopback": "loopback TCP",
    "unix": "Unix socket",
    "fast": "10 Gb/s, 0.1 ms",
    "lan": "1 Gb/s, 0.2 ms",
    "wan": "1 Gb/s, 20 ms",
}
STEPS = {
    "resnet32": "ResNet-50 training step, batch 32",
    "resnet16": "ResNet-50 training step, batch 16",
    "resnet32copy": "ResNet-50 training step, batch 32, its batch copied from the host",
    "mlp": "small MLP training step, batch 64",
}
# What we hold ourselves to: the smallest ratio to native.
WANTED = {(p, v): w for p in ("resnet32", "resnet16") for v, w in (("loopback", 0.95), ("unix", 0.95), ("wan", 0.85))}
CALLS = {
    "launch_us": "kernel launch, enqueue",
    "launch_drained_us": "kernel launch, 20,000 and one synchronisation",
    "launch_sync_us": "kernel launch and synchronise",
    "h2d4_us": "copy of 4 bytes to the device",
    "d2h4_us": "copy of 4 bytes from the device",
    "event_query_us": "query of a completed event",
    "event_record_us": "event record",
}


class Run:
    """One run of one program: what it printed and what the shim counted."""

    def __init__(self, line):
        self.data = line["result"]
        self.counted = bool(line["stats"])
        self.count = {k: sum(s[k] for s in line["stats"]) for k in ("calls", "oneway", "waits", "bytes_out", "bytes_in")}


def load(log):
    """{part: {variant: {run: Run}}}; of several runs of a name the last."""
    found = {}
    for line in rawlog.read(log):
        part, variant, number = line["run"].split(".")
        found.setdefault(part, {}).setdefault(variant, {})[number] = Run(line)
    if not found:
        sys.exit(f"report: no runs in {log}; run bench/gpu-bench.sh on a machine with a GPU")
    return found


def size(n):
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= step:
            return f"{n / step:.1f} {unit}"
    return f"{n:.0f} B"


def per_step(runs):
    """Counts per step by subtraction, or None when a run or its counts are missing."""
    long, short = runs.get("1"), runs.get("short")
    if not (long and short and long.counted and short.counted):
        return None
    steps = long.data["total_steps"] - short.data["total_steps"]
    return {k: (long.count[k] - short.count[k]) / steps for k in long.count}


def step_rows(variants):
    """Rows of a training program: a dict of figures per link, ratios against both native runs."""
    native = [ms for r in variants.get("native", {}).values() for ms in r.data["ms"]]
    if not native:
        return []
    base = statistics.median(native)
    native_cpu = statistics.median(r.data["cpu_ms"] for r in variants["native"].values())
    rows = []
    for v in LINKS:
        if "1" not in variants.get(v, {}):
            continue
        run = variants[v]["1"]
        counts = per_step(variants[v])
        rows.append(
            {
                "variant": v,
                "native": base,
                "native_least": min(native),
                "native_runs": len(variants["native"]),
                "native_spread": (max(native) - min(native)) / base,
                "native_cpu": native_cpu,
                "remote": run.data["median_ms"],
                "ratio": base / run.data["median_ms"],
                "spread": (run.data["max_ms"] - run.data["min_ms"]) / run.data["median_ms"],
                "start": run.data["start_s"],
                "cpu": run.data["cpu_ms"],
                "counts": counts,
            }
        )
    return rows


def step_text(part, row):
    c = row["counts"]
    text = (
        f"{part:9} {LINKS[row['variant']]:15} native {row['native']:8.3f} ms  remote {row['remote']:8.3f} ms  "
        f"ratio {row['ratio']:.3f}  spread {row['native_spread']:.1%} / {row['spread']:.1%}"
    )
    if c:
        launches = c["oneway"] or 1
        text += (
            f"  per step: waits {c['waits']:.2f}, calls {c['calls']:.0f}, out {size(c['bytes_out'])}, in {size(c['bytes_in'])}"
            f"  client CPU per launch {row['cpu'] * 1e3 / launches:.2f} us (native {row['native_cpu'] * 1e3 / launches:.2f})"
        )
    want = WANTED.get((part, row["variant"]))
    if want:
        text += f"  {'meets' if row['ratio'] >= want else 'MISSES'} {want}"
    return text


def call_rows(variants):
    """Rows of the launch program: (name, native figures, {link: figures}); figures are median, min, max, CPU."""
    native = variants.get("native", {})
    rows = []
    for key, title in CALLS.items():
        base = [r.data[key] for r in native.values() if key in r.data]
        if not base:
            continue
        base = [statistics.median(b[i] for b in base) for i in range(4)]
        links = {v: variants[v]["1"].data[key] for v in LINKS if "1" in variants.get(v, {}) and key in variants[v]["1"].data}
        rows.append((title, base, links))
    return rows


def call_text(part, title, base, links):
    for v, f in links.items():
        yield (
            f"{part:9} {LINKS[v]:15} {title:46} native {base[0]:9.2f} us  remote {f[0]:9.2f} us  ratio {base[0] / f[0]:.3f}  "
            f"spread {(f[2] - f[1]) / f[0]:.1%}  client CPU {f[3]:.2f} us (native {base[3]:.2f})"
        )


def text(found, only):
    for part, variants in found.items():
        if only and part != only:
            continue
        if part == "launch":
            for row in call_rows(variants):
                yield from call_text(part, *row)
            for v in LINKS:
                r = variants.get(v, {}).get("1")
                if r and r.counted:
                    yield (
                        f"{part:9} {LINKS[v]:15} whole program: calls {r.count['calls']}, waits {r.count['waits']}, "
                        f"out {size(r.count['bytes_out'])}, in {size(r.count['bytes_in'])}"
                    )
        else:
            for row in step_rows(variants):
                yield step_text(part, row)


def machine(log):
    yield "```"
    for h in rawlog.headers(log):
        yield from rawlog.text(h)
    yield "```"


def gpu_page(log):
    found = load(log)
    yield from machine(log)
    for part in (p for p in STEPS if p in found):
        rows = step_rows(found[part])
        if not rows:
            continue
        yield ""
        yield f"## {STEPS[part]}"
        yield ""
        where = "two runs, one before and one after the others" if rows[0]["native_runs"] > 1 else "one run before the others"
        yield f"Native: {rows[0]['native']:.3f} ms, at least {rows[0]['native_least']:.3f} ms, spread {rows[0]['native_spread']:.1%} over {where}."
        yield ""
        yield "| link | ms | ratio | spread | waits per step | calls per step | out per step | in per step | client CPU per launch | start |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for r in rows:
            c = r["counts"]
            counts = (
                f"{c['waits']:.2f} | {c['calls']:.0f} | {size(c['bytes_out'])} | {size(c['bytes_in'])} | "
                f"{r['cpu'] * 1e3 / (c['oneway'] or 1):.2f} us (native {r['native_cpu'] * 1e3 / (c['oneway'] or 1):.2f})"
                if c
                else "not counted | | | |"
            )
            yield f"| {LINKS[r['variant']]} | {r['remote']:.3f} | {r['ratio']:.3f} | {r['spread']:.1%} | {counts} | {r['start']:.1f} s |"
    if "launch" in found:
        rows = call_rows(found["launch"])
        links = [v for v in LINKS if any(v in row[2] for row in rows)]
        yield ""
        yield "## Single calls"
        yield ""
        yield "Microseconds per call, median; in brackets the processor time of the client process per call."
        yield ""
        yield "| call | native | " + " | ".join(LINKS[v] for v in links) + " |"
        yield "|---" * (len(links) + 2) + "|"
        for title, base, by in rows:
            cells = [f"{by[v][0]:.2f} ({by[v][3]:.2f})" if v in by else "" for v in links]
            yield f"| {title} | {base[0]:.2f} ({base[3]:.2f}) | " + " | ".join(cells) + " |"


# The daemons' figures, in the order of the page.
FIGURES = {
    "acquire1": "acquire to granted, one fraction, pool of 3 owners",
    "acquire3": "acquire to granted, 12 fractions on 3 owners",
    "open": "session open, warm worker",
    "placement": "placement against 1,000 GPUs",
    "memory": "resident memory, owner: 8 GPUs, 192 fractions",
    "memory-host": "resident memory, host of 192 leases",
    "scrape": "scrape of /metrics, 192 leases",
    "idle": "idle, owner: 192 leases",
    "idle-host": "idle, host of 192 leases",
}


# Those of jobs on a real Slurm.
SLURM = {
    "srun-without": "srun /bin/true in an allocation, without the plug-in",
    "srun-more": "the same with the plug-in: more, for a job that asks for nothing",
    "prolog-start-more": "node's Prolog to the first line of the script: more, for a job that asks",
    "job-start-more": "PrologSlurmctld to the first line of the script: more, for a job that asks",
}


def centile(samples, share):
    """The smallest sample that is not less than that share of them."""
    return sorted(samples)[max(0, -(-len(samples) * share // 100) - 1)]


def rows(log, figures):
    """(title, figure, {name: value}, met) for each figure that there is."""
    found = {f["name"]: f for f in rawlog.read(log)}
    for name, title in figures.items():
        f = found.get(name)
        if not f:
            continue
        v = f["samples"]
        values = {"min": min(v), "median": statistics.median(v), "p99": centile(v, 99), "max": max(v)}
        met = None
        if f["wanted"] != "-":  # it is there to compare with
            which, sign, bound = f["wanted"].split()
            met = values[which] < float(bound) if sign == "<" else values[which] >= float(bound)
        yield title, f, values, met


def number(x):
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" if x < 1 else f"{x:.1f}"


def daemon_text(log):
    for title, f, v, met in rows(log, FIGURES):
        yield (
            f"{title:52} median {number(v['median'])} p99 {number(v['p99'])} max {number(v['max'])} {f['unit']}"
            f"  {'meets' if met else 'MISSES'} {f['wanted']}"
        )


def table(log, figures):
    yield from machine(log)
    yield ""
    yield "| figure | unit | least | median | 99 % | most | samples | wanted | |"
    yield "|---" * 9 + "|"
    for title, f, v, met in rows(log, figures):
        cells = " | ".join(number(v[k]) for k in ("min", "median", "p99", "max"))
        word = "" if met is None else "met" if met else "**missed**"
        yield f"| {title} | {f['unit']} | {cells} | {len(f['samples'])} | {f['wanted']} | {word} |"
    yield ""
    for title, f, _, _ in rows(log, figures):
        yield f"- {title}: {f['how']}."


def floor(ratio):
    """A ratio that something reaches or passes, in hundredths."""
    return f"{math.floor(ratio * 100) / 100:.2f}"


def summary(gpu_log, daemon_log):
    found = load(gpu_log)
    steps = {(p, r["variant"]): r for p in ("resnet32", "resnet16") for r in step_rows(found.get(p, {}))}
    bound = lambda r: r["native_least"] / r["remote"]
    near = min(bound(r) for (_, v), r in steps.items() if v in ("loopback", "unix"))
    far = min(bound(r) for (_, v), r in steps.items() if v == "wan")
    copied = next(r for r in step_rows(found["resnet32copy"]) if r["variant"] == "fast")
    waits = round(max(r["counts"]["waits"] for r in steps.values() if r["counts"]))
    drained = next(links for title, _, links in call_rows(found["launch"]) if title == CALLS["launch_sync_us"])
    took = {name: v for name, (_, _, v, _) in zip(FIGURES, rows(daemon_log, FIGURES), strict=True)}
    name = rawlog.headers(gpu_log)[0]["gpu"].split(",")[0].removeprefix("NVIDIA ")
    yield f"On an {name}, with the batch on the GPU, a training step of ResNet-50 at batch 32 and 16 runs at {floor(near)} of native speed or"
    yield f"better over loopback TCP and over a Unix socket, and at {floor(far)} or better over a link of 1 Gb/s with a round trip of"
    yield f"20 ms (the median against the fastest native repeat); it makes {waits or 'no'} calls that wait. With the batch copied to the GPU in each step it runs"
    yield f"at {floor(bound(copied))} over a link of 10 Gb/s. A program that waits after every launch pays a round trip each time: launch"
    yield f"and wait take {drained['unix'][0]:.0f} us over a Unix socket, {drained['loopback'][0]:.0f} us over loopback TCP, and the network's own time beyond."
    yield f"A lease is granted in {number(took['acquire1']['median'])} ms, a session opens in {number(took['open']['median'])} ms (medians, simulated GPUs), and a daemon with"
    yield f"192 leases has {max(took[k]['max'] for k in ('memory', 'memory-host')):.0f} MiB resident."


def container(log):
    """Of the lines that gpu-container.sh prints: PASS NAME-time a container's start takes X ms through the wrapper, Y ms with a lease ..."""
    text = Path(log).read_text()
    yield "| runtime | start, ms | with a lease, ms | more, ms |"
    yield "|---|---|---|---|"
    found = re.findall(r"^PASS (\S+)-(root|rootless)-time .* takes ([\d.]+) ms .*, ([\d.]+) ms with a lease: ([\d.]+) ms more \(medians of (\d+)\)$", text, re.M)
    for runtime, who, without, leased, more, _ in found:
        yield f"| {runtime}, {who} | {without} | {leased} | {more} |"
    yield ""
    h = rawlog.headers(log)[0]
    yield f"{h['gpu']}, {h['processor']}, {h['cores']} cores; medians of {found[0][5]} starts."


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--text", action="store_true", help="lines for a terminal instead of a block of a page")
    p.add_argument("--part", help="with --text: this program only")
    p.add_argument("what", choices=("gpu", "daemon", "slurm", "summary", "container"))
    p.add_argument("log", nargs="+", type=Path, help="the raw log; summary has two")
    a = p.parse_args()
    if a.text:
        lines = text(load(a.log[0]), a.part) if a.what == "gpu" else daemon_text(a.log[0])
    else:
        lines = {
            "gpu": gpu_page, "daemon": lambda log: table(log, FIGURES), "slurm": lambda log: table(log, SLURM), "summary": summary, "container": container,
        }[a.what](*a.log)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
