#!/usr/bin/env python3
"""Moves arrays to JAX's pinned host memory and back, and compares every byte.

Prints one line with the number of tries that were right each way, which is the same natively and remotely.
Exit status 1 when any was wrong. Usage: pinned_host.py [TRIES]
"""
import sys

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

tries = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
device = jax.devices()[0]
host = SingleDeviceSharding(device, memory_kind="pinned_host")
back = SingleDeviceSharding(device, memory_kind="device")
rng = np.random.default_rng(1)
right_host = right_back = 0
for i in range(tries):
    want = rng.integers(0, 2**31, size=int(rng.integers(1, 60000)), dtype=np.int32)
    x = jax.device_put(want, device)
    y = jax.device_put(x, host)
    right_host += bool(np.array_equal(np.asarray(y), want))
    z = jax.device_put(y, back)
    right_back += bool(np.array_equal(np.asarray(z), want))
print(f"pinned_host: {tries} tries, {right_host} right on the host, {right_back} right back on the device")
sys.exit(0 if right_host == right_back == tries else 1)
