"""What NVML of the real GPU says a worker holds: samples until told to stop, then one JSON line.

Sums the used memory of the process given and all its descendants, and keeps the
largest sum. Runs beside the worker, never under the shim.
"""

import argparse
import ctypes
import json
import signal
import time
from pathlib import Path


class ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


NOT_AVAILABLE = 2**64 - 1


def family(root):
    """The process and everything that descends from it."""
    parent = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parent[int(stat.parent.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    found, grown = {root}, True
    while grown:
        more = {p for p, pp in parent.items() if pp in found} - found
        found |= more
        grown = bool(more)
    return found


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--pid", type=int, required=True, help="the worker's process")
    p.add_argument("--interval", type=float, default=0.02, help="seconds between samples")
    a = p.parse_args()

    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def check(rc, what):
        if rc:
            raise SystemExit(f"nvml_sample: {what} gave {rc}")

    check(nvml.nvmlInit_v2(), "nvmlInit_v2")
    device = ctypes.c_void_p()
    check(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)), "nvmlDeviceGetHandleByIndex_v2")
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    print("sampling", flush=True)

    samples, seen, most, device_most, unknown = 0, 0, 0, 0, 0
    while not stop:
        n = ctypes.c_uint(256)
        infos = (ProcessInfo * 256)()
        check(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(n), infos), "nvmlDeviceGetComputeRunningProcesses_v3")
        ours = family(a.pid)
        used = [i.used for i in infos[: n.value] if i.pid in ours]
        unknown += used.count(NOT_AVAILABLE)
        total = sum(u for u in used if u != NOT_AVAILABLE)
        memory = Memory()
        check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
        samples += 1
        seen += bool(used)
        most = max(most, total)
        device_most = max(device_most, memory.used)
        time.sleep(a.interval)
    print(json.dumps({"samples": samples, "seen": seen, "most": most, "unknown": unknown, "device_most": device_most}))


if __name__ == "__main__":
    main()
