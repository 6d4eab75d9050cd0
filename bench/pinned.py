"""Pinned memory: non-blocking copies both ways, in order, over several streams; waits by event and by polling."""

import sys
import time

import torch


def round_trips(size, streams):
    """Each stream takes its own bytes to the device, adds to them there and brings them back."""
    src = [torch.randint(0, 200, (size,), dtype=torch.uint8).pin_memory() for _ in streams]
    dst = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in streams]
    events = []
    for i, s in enumerate(streams):
        with torch.cuda.stream(s):
            d = src[i].to("cuda", non_blocking=True)
            d.add_(i + 1)
            dst[i].copy_(d, non_blocking=True)
            e = torch.cuda.Event()
            e.record()
            events.append(e)
    for i, e in enumerate(events):
        if i % 2:
            e.synchronize()
        else:
            end = time.monotonic() + 60
            while not e.query():
                assert time.monotonic() < end, "an event never completed"
        assert torch.equal(dst[i], src[i] + (i + 1)), f"{size} bytes, stream {i}: wrong bytes came back"


def reuse(rounds):
    """One pinned buffer written again and again: each copy must take what was there when it ran."""
    buf = torch.empty(1 << 20, dtype=torch.int32).pin_memory()
    total = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    for i in range(rounds):
        buf.fill_(i)
        total += buf.to("cuda", non_blocking=True)
        torch.cuda.current_stream().synchronize()
    assert (total == sum(range(rounds))).all(), "a reused pinned buffer arrived wrong"


def read_back_order(rounds):
    """Copies into one pinned buffer in stream order: the last one wins."""
    out = torch.zeros(1 << 18, dtype=torch.int32).pin_memory()
    d = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
    for _ in range(rounds):
        d += 1
        out.copy_(d, non_blocking=True)
    torch.cuda.synchronize()
    assert (out == rounds).all(), "copies back came out of order"


def bandwidth(size):
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    dev = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, a, b in (("to the device", dev, host), ("from the device", host, dev)):
        a.copy_(b, non_blocking=True)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        a.copy_(b, non_blocking=True)
        torch.cuda.synchronize()
        print(f"{size / (time.perf_counter() - begun) / 1e9:.2f} GB/s {name}", file=sys.stderr)


def main():
    torch.manual_seed(7)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for size in (1, 4095, 4 << 20, (4 << 20) + 1, (48 << 20) + 13):
        round_trips(size, streams)
        print("round trips of", size, "bytes are right")
    reuse(50)
    print("a reused buffer is right")
    read_back_order(200)
    print("copies back are in order")
    bandwidth(256 << 20)


if __name__ == "__main__":
    main()
