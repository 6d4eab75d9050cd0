"""One of many tenants: a small network that is trained, with a look now and then at what a launch takes.

Prints "ready" and the socket of its lease, reads pairs of times from standard input, ns of CLOCK_MONOTONIC on one line, trains from
the first to the second of each pair, and prints one line of JSON: for each pair the steps that were done and
how long one small kernel took from its launch to its end, in us, as often as it was tried.

Before that it looks at the memory it was granted: all of what is said to be free can be had, more cannot.
"""

import json
import os
import sys
import time

import torch

DEVICE = os.environ.get("SHARE_DEVICE", "cuda")
BATCH, WIDTH, STEPS = (1024, 2048, 10) if DEVICE == "cuda" else (8, 32, 10)


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def memory():
    """the total, and whether more than it is refused while most of what is free is given"""
    if DEVICE != "cuda":
        return {"total": 0, "given": True, "refused": True}
    free, total = torch.cuda.mem_get_info()
    try:
        held = torch.empty(free - (256 << 20), dtype=torch.uint8, device=DEVICE)
        given = held.numel() > 0
        del held
    except torch.cuda.OutOfMemoryError:
        given = False
    torch.cuda.empty_cache()
    try:
        torch.empty(total + (1 << 20), dtype=torch.uint8, device=DEVICE)
        refused = False
    except torch.cuda.OutOfMemoryError:
        refused = True
    torch.cuda.empty_cache()
    return {"total": total, "given": given, "refused": refused}


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = []
    for _ in range(3):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    y = torch.randint(0, 10, (BATCH,), device=DEVICE)
    probe = torch.zeros(1, device=DEVICE)

    def train():
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    for _ in range(3):
        train()
    held = memory()
    train()
    wait()
    print("ready", os.environ.get("SLUICE_SOCKET", "-"), flush=True)
    times = [int(w) for w in sys.stdin.readline().split()]
    spans = []
    for begin, end in zip(times[::2], times[1::2]):
        time.sleep(max(0, begin - time.monotonic_ns()) / 1e9)
        steps, latency = [], []
        while time.monotonic_ns() < end:
            loss = train()
            steps.append((time.monotonic_ns() - begin) // 1000)
            t = time.perf_counter()
            probe += 1
            wait()
            latency.append(round((time.perf_counter() - t) * 1e6, 1))
        wait()
        # The last steps were given in this span and may have ended after it.
        spans.append({"begin": begin, "end": end, "at_us": steps, "steps": STEPS, "latency_us": latency})
    print(json.dumps({"memory": held, "spans": spans, "loss": loss if times else None}), flush=True)


if __name__ == "__main__":
    main()
