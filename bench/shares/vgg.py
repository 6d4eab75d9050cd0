"""Inference with VGG-16, the case of the seed's table V: so many images, a batch at a time, timed as a whole.

Images are bytes in the host's memory; each batch goes to the GPU, through the network and back as classes
before the next one begins. Random weights: what is computed does not matter, how long it takes does.

Prints "ready" and the socket of its lease, then for each line on standard input, which is when to begin in ns of CLOCK_MONOTONIC and
how many images, one line of JSON.
"""

import argparse
import json
import os
import sys
import time

import torch
import torchvision

DEVICE = os.environ.get("SHARE_DEVICE", "cuda")
SIZE = 224 if DEVICE == "cuda" else 32


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--kept", type=int, default=1024, help="different images; they are used again and again")
    a = p.parse_args()
    if DEVICE != "cuda":  # a trial where there is no GPU
        a.batch, a.kept = 1, 4
    torch.manual_seed(1)
    torch.set_num_threads(2)
    model = torchvision.models.vgg16(weights=None).eval().to(DEVICE)
    images = torch.randint(0, 256, (max(a.kept // a.batch, 1), a.batch, 3, SIZE, SIZE), dtype=torch.uint8)
    if DEVICE == "cuda":
        images = images.pin_memory()
    mean = torch.tensor([0.485, 0.456, 0.406], device=DEVICE).view(1, 3, 1, 1)
    scale = torch.tensor([0.229, 0.224, 0.225], device=DEVICE).view(1, 3, 1, 1)

    def classes(i):
        x = images[i % len(images)].to(DEVICE, non_blocking=True)
        return model((x.float() / 255 - mean) / scale).argmax(1).cpu()

    with torch.inference_mode():
        for i in range(10):
            classes(i)
        wait()
        print("ready", os.environ.get("SLUICE_SOCKET", "-"), flush=True)
        for line in sys.stdin:
            begin, n = (int(w) for w in line.split())
            n = n if DEVICE == "cuda" else min(n, 10)
            time.sleep(max(0, begin - time.monotonic_ns()) / 1e9)
            done, seen = 0, 0
            began = time.monotonic_ns()
            while done < n:
                seen += len(classes(done // a.batch))
                done += a.batch
            wait()
            ended = time.monotonic_ns()
            print(json.dumps({"images": done, "seen": seen, "batch": a.batch, "began": began, "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
