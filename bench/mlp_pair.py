"""The training steps of mlp.py on two devices of one process, in turn: what differs between the two is not the process.

A step takes well under a millisecond, and how fast a process calls differs by a third from process to process. Between
two devices of one process such differences cancel. A block is --steps steps and one synchronisation, which it includes;
blocks alternate between the devices as 0 1 1 0, so that a processor that grows slower or faster favours neither.
"""

import argparse
import json
import statistics
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


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--steps", type=int, default=40, help="steps in one block")
    p.add_argument("--warmup", type=int, default=400, help="steps of each device before the first block")
    p.add_argument("--seconds", type=float, default=8, help="how long blocks are begun")
    a = p.parse_args()
    devices = [torch.device("cuda", i) for i in range(2)]
    steps = [trainer(d, a.batch, lambda x, y: lambda: (x, y)) for d in devices]
    for d, s in zip(devices, steps):
        block(s, d, a.warmup)
    ms, until = ([], []), time.perf_counter() + a.seconds
    while time.perf_counter() < until:
        for i in (0, 1, 1, 0):
            ms[i].append(block(steps[i], devices[i], a.steps))
    print(
        json.dumps(
            {
                "bench": "mlp_pair",
                "batch": a.batch,
                "steps": a.steps,
                "ms": [[round(t, 4) for t in m] for m in ms],
                "median_ms": [round(statistics.median(m), 4) for m in ms],
                "loss": [s().item() for s in steps],
                "gpu": torch.cuda.get_device_name(0),
            }
        )
    )


if __name__ == "__main__":
    main()
