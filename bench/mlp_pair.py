"""The training steps of mlp.py on two devices of one process, in turn: what differs between the two is not the process.

A step takes well under a millisecond, and how fast a process calls differs by a third from process to process. Between
two devices of one process such differences cancel. A block is --steps steps and one synchronisation, which it includes;
blocks alternate between the devices as 0 1 1 0, so that a processor that grows slower or faster favours neither.
What is left is which processors the threads have: the thread that calls is slower beside one that polls on the same
core. So each four blocks have processors that are drawn anew, the same for both devices. The backward pass runs on the
calling thread: PyTorch has a thread for each device there, and how soon the kernel wakes it would differ by more.

Every second process of --processes names the workers in the other order; they are forked from one that has imported
PyTorch. Prints a JSON line for each; order says which of SLUICE_WORKER's two its devices were.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from mlp import trainer


def block(step, device, steps):
    """Milliseconds a step."""
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) * 1e3 / steps


def threads(pid):
    return [int(t.name) for t in Path(f"/proc/{pid}/task").glob("[0-9]*")]


def sessions():
    """The processes of all sessions on this machine."""
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if b"session" in (p / "cmdline").read_bytes().split(b"\0"):
                yield int(p.name)
        except OSError:
            continue  # it has ended


def place(sessions, processors):
    """Gives the calling thread a processor of its own, this process's other threads two, and the sessions three."""
    drawn = random.sample(processors, 6)
    sets = {tid: drawn[1:3] for tid in threads("self")}
    sets[os.getpid()] = drawn[:1]
    for pid in sessions:
        sets.update({tid: drawn[3:] for tid in threads(pid)})
    for tid, cpus in sets.items():
        try:
            os.sched_setaffinity(tid, cpus)
        except ProcessLookupError:
            pass  # the thread has ended


def pair(a, order):
    """One process's line."""
    torch.autograd.set_multithreading_enabled(False)
    devices = [torch.device("cuda", i) for i in range(2)]
    steps = [trainer(d, a.batch, lambda x, y: lambda: (x, y)) for d in devices]
    for d, s in zip(devices, steps):
        block(s, d, a.warmup)
    ms, until = ([], []), time.perf_counter() + a.seconds
    owners, processors = list(sessions()), sorted(os.sched_getaffinity(0))
    while time.perf_counter() < until:
        if len(processors) >= 8:
            place(owners, processors)
        for i in (0, 1, 1, 0):
            ms[i].append(block(steps[i], devices[i], a.steps))
    return {
        "bench": "mlp_pair",
        "batch": a.batch,
        "steps": a.steps,
        "order": order,
        "ms": [[round(t, 4) for t in m] for m in ms],
        "median_ms": [round(statistics.median(m), 4) for m in ms],
        "loss": [s().item() for s in steps],
        "gpu": torch.cuda.get_device_name(0),
    }


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--steps", type=int, default=40, help="steps in one block")
    p.add_argument("--warmup", type=int, default=200, help="steps of each device before the first block")
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--seconds", type=float, default=10, help="how long blocks are begun in each process")
    a = p.parse_args()
    workers = os.environ["SLUICE_WORKER"].split(",")
    if len(workers) != 2:
        sys.exit(f"mlp_pair: SLUICE_WORKER names {len(workers)} workers, not two")
    for i in range(a.processes):
        order = [0, 1] if i % 2 == 0 else [1, 0]
        child = os.fork()
        if not child:
            os.environ["SLUICE_WORKER"] = ",".join(workers[k] for k in order)
            print(json.dumps(pair(a, order)), flush=True)
            return
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"mlp_pair: process {i + 1} of {a.processes}: wait status {status}")


if __name__ == "__main__":
    main()
