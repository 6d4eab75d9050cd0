"""Lines for a terminal of the raw log of gpu-several.sh: each figure natively, remotely, and the share of native speed.

several_report.py LOG
several_report.py --page LOG    the tables of docs/benchmarks.md

Exit status 1 if a case failed remotely, or gave another result than natively.
"""

import sys

import rawlog

# What two runs of a case must have in common, in each of their processes.
SAME = ("losses", "wrong", "parameters", "sums", "child", "can_access", "error", "after")


def load(log):
    """{case: {place: line}}"""
    found = {}
    for line in rawlog.read(log):
        if "run" in line:
            found.setdefault(line["run"], {})[line["place"]] = line
    return found


def ranks(line):
    return (line.get("result") or {}).get("ranks", []) if line else []


def rows(line):
    """{(what, bytes): row} of the first process."""
    return {(r["what"], r["bytes"]): r for r in (ranks(line) or [{}])[0].get("rows", [])}


def figures(native, remote):
    n, r = rows(native), rows(remote)
    for key in dict.fromkeys([*n, *r]):
        cells = []
        for place, row in (("native", n.get(key)), ("remote", r.get(key))):
            if row:
                waited = f" {row['waited_us']:9.1f} waited for" if "waited_us" in row else ""
                cells.append(f"{place} {row['bus_gb_s']:8.3f} GB/s {row['us']:9.1f} us{waited}")
        ratio = f"   {r[key]['bus_gb_s'] / n[key]['bus_gb_s']:.2f}" if key in n and key in r else ""
        yield f"{key[0]:14} {key[1]:>10}  " + "   ".join(cells) + ratio
    m = [(ranks(line) or [{}])[0].get("median_ms") for line in (native, remote)]
    if any(m):
        text = [f"{place} {ms:.2f} ms a step" for place, ms in zip(("native", "remote"), m) if ms]
        yield "   ".join(text) + (f"   {m[0] / m[1]:.3f} of native speed" if all(m) else "")
    for place, line in (("native", native), ("remote", remote)):
        for i, rank in enumerate(ranks(line)):
            if "error" in rank:
                yield f"{place}, process {i}: {rank['error']} after {rank['error_s']} s, given up after {rank.get('aborted_s')} s"


def judge(case, native, remote):
    """What is wrong with the case."""
    for place, line in (("native", native), ("remote", remote)):
        if line and line["status"]:
            yield f"{place}: {(line.get('result') or {}).get('failed') or 'exit status %d' % line['status']}"
        for i, rank in enumerate(ranks(line)):
            if rank.get("wrong"):
                yield f"{place}, process {i}: wrong results of {', '.join(rank['wrong'])}"
    if native and remote and not native["status"] and not remote["status"]:
        for i, (a, b) in enumerate(zip(ranks(native), ranks(remote))):
            for key in SAME:
                if a.get(key) != b.get(key):
                    yield f"process {i}: {key} natively {a.get(key)}, remotely {b.get(key)}"


NAMES = {
    "ddp": "ResNet-50, DDP, batch 32 a GPU",
    "dataparallel": "ResNet-18, DataParallel, batch 64",
    "fsdp": "transformer of a billion parameters, FSDP2",
    "tensor": "small transformer, tensor parallel of two",
}


def size(n):
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >> shift:
            return f"{n >> shift} {unit}"
    return str(n)


def page(log):
    """Tables: collectives and copies, steps, and what else was the same."""
    head, found = rawlog.headers(log)[0], load(log)
    yield f"{head['gpu']}, driver {head['driver']}, PyTorch {head.get('pytorch', 'unknown')}, commit {head['commit']}, {head['date'][:10]}."
    yield ""
    yield "| over loopback TCP | bytes | native, GB/s | remote, GB/s | ratio | native, a call that is waited for | remote |"
    yield "|---" * 7 + "|"
    for case, of in (("collectives", ""), ("onecomm", ", one process"), ("copies", "")):
        n, r = (rows(found.get(case, {}).get(place)) for place in ("native", "remote"))
        for (what, count), a in n.items():
            b = r.get((what, count))
            if b:
                waited = [f"{x['waited_us']:.0f} us" if "waited_us" in x else "" for x in (a, b)]
                yield f"| {what}{of} | {size(count)} | {a['bus_gb_s']:.2f} | {b['bus_gb_s']:.2f} | {b['bus_gb_s'] / a['bus_gb_s']:.2f} | {waited[0]} | {waited[1]} |"
    yield ""
    yield "| training | native, a step | remote | share of native speed | losses |"
    yield "|---" * 5 + "|"
    for case, name in NAMES.items():
        native, remote = (found.get(case, {}).get(place) for place in ("native", "remote"))
        m = [(ranks(line) or [{}])[0].get("median_ms") for line in (native, remote)]
        if all(m):
            same = all(a.get("losses") == b.get("losses") for a, b in zip(ranks(native), ranks(remote)))
            yield f"| {name} | {m[0]:.2f} ms | {m[1]:.2f} ms | {m[0] / m[1]:.3f} | {'the same, bit for bit' if same else 'DIFFERENT'} |"
    reads = [str(process["waits_by_function"].get("host_read", 0)) for process in found.get("fsdp", {}).get("remote", {}).get("stats", [])]
    if reads:
        yield ""
        yield f"In the whole run with FSDP2, of 18 steps, the processes waited {' and '.join(reads)} times for the contents of page-locked memory."
    yield ""
    passed = [c for c, p in found.items() if len(p) == 2 and not list(judge(c, p["native"], p["remote"]))]
    yield f"Cases with the same results: {', '.join(passed)}."
    for case, places in found.items():
        if case not in passed:
            at = [place for place, line in places.items() if line["status"]]
            yield f"{case} failed: {' and '.join(at)}." if at else f"{case}: the results differ."


def main(log):
    bad = 0
    for case, places in load(log).items():
        native, remote = places.get("native"), places.get("remote")
        print(f"-- {case}")
        for line in figures(native, remote):
            print(line)
        wrong = list(judge(case, native, remote))
        bad += len(wrong)
        for line in wrong:
            print(f"FAIL {case}: {line}")
        if not wrong and native and remote:
            same = [k for k in SAME if any(k in r for r in ranks(remote))]
            print(f"PASS {case}" + (f": the same {', '.join(same)}" if same else ""))
    return bad


if __name__ == "__main__":
    if sys.argv[1] == "--page":
        print(*page(sys.argv[2]), sep="\n")
        sys.exit()
    sys.exit(1 if main(sys.argv[1]) else 0)
