"""The training steps of mlp.py on two devices of one process, in turn: what differs between the two is not the process.

A step takes well under a millisecond, and how fast a process calls differs by a third from process to process. Between
two devices of one process such differences cancel. A block is --steps steps and one synchronisation, which it includes;
blocks alternate between the devices as 0 1 1 0, so that a processor that grows slower or faster favours neither.
What is left differs by about a hundredth from process to process, so there are many short ones: they are forked from one
that has imported PyTorch, and every second one names the workers in the other order. The backward pass runs on the
calling thread: PyTorch has a thread for each device there, and how soon the kernel wakes it would differ by more.

Prints a JSON line for each process; order says which of SLUICE_WORKER's two its devices were.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch

from mlp import trainer


def block(step, device, steps):
    """Milliseconds a step."""
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) * 1e3 / steps


def pair(a, order):
    """One process's line."""
    torch.autograd.set_multithreading_enabled(False)
    devices = [torch.device("cuda", i) for i in range(2)]
    steps = [trainer(d, a.batch, lambda x, y: lambda: (x, y)) for d in devices]
    for d, s in zip(devices, steps):
        block(s, d, a.warmup)
    ms, until = ([], []), time.perf_counter() + a.seconds
    while time.perf_counter() < until:
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
    p.add_argument("--seconds", type=float, default=2, help="how long blocks are begun in each process")
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
