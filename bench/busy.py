"""Keeps a GPU busy with matrix products for --seconds, and prints how many were done in each whole second of the clock.

The line of JSON has "from", the first of these seconds since 1970, and "products", one number for each second from there
on. Programs that ran at the same time can so be compared over the seconds that they have in common. A few products are
always queued, so that the GPU never waits for the program.
"""

import argparse
import collections
import json
import math
import time

import torch

QUEUED = 8


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--size", type=int, default=4096, help="rows of the matrices")
    p.add_argument("--seconds", type=int, default=10)
    a = p.parse_args()
    m = torch.randn(a.size, a.size, device="cuda")
    out = torch.empty_like(m)
    queue, done = collections.deque(), collections.Counter()
    for _ in range(3):
        torch.mm(m, m, out=out)
    torch.cuda.synchronize()
    begin = math.ceil(time.time())
    while True:
        torch.mm(m, m, out=out)
        queue.append(torch.cuda.Event())
        queue[-1].record()
        if len(queue) < QUEUED:
            continue
        queue.popleft().synchronize()
        now = time.time()
        if now >= begin + a.seconds:
            break
        done[int(now) - begin] += 1
    print(json.dumps({"bench": "busy", "from": begin, "products": [done[i] for i in range(a.seconds)]}))


if __name__ == "__main__":
    main()
