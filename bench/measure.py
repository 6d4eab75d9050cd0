"""Times a training step the same way for every program in this folder, and prints one JSON line.

Waiting calls and bytes per step are not visible from inside: the shim counts
them for a whole process (SLUICE_STATS). The caller runs two lengths that differ
in nothing but their steps and subtracts; report.py does the arithmetic.
"""

import argparse
import json
import resource
import statistics
import time

import torch

BEGUN = time.perf_counter()


def arguments(batch):
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=batch)
    p.add_argument("--steps", type=int, default=40, help="steps in one repeat")
    p.add_argument("--warmup", type=int, default=20, help="steps before the first repeat")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--copy", action="store_true", help="copy the batch from the host in each step")
    return p.parse_args()


def feed(a, *batch):
    """A function that gives a step its batch: the same tensors, which lie on the device, or with --copy new copies of
    them from pinned memory, as a loader's batches are copied."""
    if not a.copy:
        return lambda: batch
    source = [t.cpu().pin_memory() for t in batch]
    return lambda: [t.cuda(non_blocking=True) for t in source]


def cpu_seconds():
    """User and system time of this process, all its threads."""
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime


def measure(name, a, step):
    """Runs step() as a says. A repeat ends with one synchronisation, which it includes."""
    loss = None
    for _ in range(a.warmup):
        loss = step()
    torch.cuda.synchronize()
    start = time.perf_counter() - BEGUN
    wall, cpu = [], []
    for _ in range(a.repeats):
        c0, t0 = cpu_seconds(), time.perf_counter()
        for _ in range(a.steps):
            loss = step()
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - t0) * 1e3 / a.steps)
        cpu.append((cpu_seconds() - c0) * 1e3 / a.steps)
    print(
        json.dumps(
            {
                "bench": name,
                "batch": a.batch,
                "copy": a.copy,
                "steps": a.steps,
                "repeats": a.repeats,
                "total_steps": a.warmup + a.repeats * a.steps,
                "start_s": round(start, 2),
                "ms": [round(t, 4) for t in wall],
                "median_ms": round(statistics.median(wall), 4),
                "min_ms": round(min(wall), 4),
                "max_ms": round(max(wall), 4),
                "cpu_ms": round(statistics.median(cpu), 4),
                "loss": loss.item(),
                "gpu": torch.cuda.get_device_name(0),
            }
        )
    )
