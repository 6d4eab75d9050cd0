"""Honest memory, as a PyTorch program sees it under a cap: the same total everywhere, what is
reported free can be had but for one granule, and the next allocation fails at once.

Prints one line per fact; the exit status tells whether all held.
"""

import argparse
import ctypes
import re
import subprocess
import sys
import time

import torch

MIB = 1 << 20
GRANULE = 2 * MIB
MODULES = 32 * MIB  # at most, for kernels loaded on the way
failures = []


def fact(ok, text):
    print("ok  " if ok else "BAD ", text, flush=True)
    if not ok:
        failures.append(text)


def smi(field):
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
    )
    try:
        return int(float(out.stdout.split()[0])) * MIB
    except (IndexError, ValueError):
        return f"{out.stdout.strip()} {out.stderr.strip()}"


def out_of_memory(size):
    """Seconds until an allocation is refused, or None when it was not."""
    begun = time.perf_counter()
    try:
        t = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as e:
        return time.perf_counter() - begun, str(e).split(". ")[0]
    del t
    return None


def runtime():
    """The CUDA runtime that PyTorch has loaded, for cudaMalloc without its cache."""
    maps = open("/proc/self/maps", encoding="ascii", errors="replace").read()
    found = re.search(r"\S*/libcudart\S*\.so\S*", maps)
    return ctypes.CDLL(found.group(0) if found else f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def fill(cudart):
    """Takes all there is in ever smaller pieces, and gives it back. Returns the bytes had."""
    held, had, size, slowest = [], 0, 1 << 30, 0.0
    while size >= GRANULE:
        p = ctypes.c_void_p()
        begun = time.perf_counter()
        rc = cudart.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(size))
        slowest = max(slowest, time.perf_counter() - begun)
        if rc == 0:
            held.append(p)
            had += size
        elif rc == 2:  # cudaErrorMemoryAllocation
            cudart.cudaGetLastError()
            size //= 2
        else:
            fact(False, f"cudaMalloc of {size} bytes gave error {rc}")
            break
    left = torch.cuda.mem_get_info()[0]
    for p in held:
        cudart.cudaFree(p)
    return had, left, slowest


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cap", type=int, required=True, help="bytes that were granted")
    a = p.parse_args()

    free, total = torch.cuda.mem_get_info()
    fact(total == a.cap, f"mem_get_info: total {total} of {a.cap} granted, free {free}")
    props = torch.cuda.get_device_properties(0).total_memory
    fact(props == a.cap, f"get_device_properties: total {props}")
    shown = smi("memory.total")
    fact(shown == a.cap, f"nvidia-smi: total {shown}")
    used = smi("memory.used")
    fact(isinstance(used, int) and abs(used - (total - free)) <= GRANULE, f"nvidia-smi: used {used}, mem_get_info: {total - free}")

    # What is needed later is loaded now: kernels take device memory too.
    torch.zeros(1024, dtype=torch.uint8, device="cuda").fill_(1).sum().item()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]

    big = None
    for size in (free, free - GRANULE):
        try:
            big = torch.empty(size, dtype=torch.uint8, device="cuda")
            break
        except torch.cuda.OutOfMemoryError:
            continue
    less = free - big.numel() if big is not None else "more than a granule"
    fact(big is not None, f"one allocation of the {free} bytes reported free, less {less}")
    if big is not None:
        big.fill_(7)
        fact(int(big[-1]) == 7 and int(big[big.numel() // 2]) == 7, "all of it can be written and read")
        left, total = torch.cuda.mem_get_info()
        fact(left <= GRANULE, f"then free is {left}")
        used = smi("memory.used")
        fact(isinstance(used, int) and abs(used - (total - left)) <= GRANULE, f"nvidia-smi: used {used}, mem_get_info: {total - left}")
        for size in (left + 1, 64 * MIB, a.cap, 2 * a.cap):
            refused = out_of_memory(size)
            told = f"refused in {refused[0] * 1e3:.1f} ms, {refused[1]}" if refused else "given"
            fact(refused is not None and refused[0] < 1, f"{size} bytes more: {told}")
    del big
    torch.cuda.empty_cache()
    again = torch.cuda.mem_get_info()[0]
    # Kernels that the driver loaded meanwhile are charged, openly, as overhead.
    fact(0 <= free - again <= MODULES, f"given back, free is {again} again, {free - again} less")
    free = again

    cudart = runtime()
    for _ in range(3):
        had, left, slowest = fill(cudart)
        fact(free - had <= GRANULE, f"in pieces: {had} of {free} bytes, {left} left, slowest call {slowest * 1e3:.1f} ms")
    again = torch.cuda.mem_get_info()[0]
    fact(again == free, f"and all of it came back: {again}")
    x = torch.randn(512, 512, device="cuda")
    fact(bool(torch.isfinite(x @ x).all()), "the device computes after all that")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
