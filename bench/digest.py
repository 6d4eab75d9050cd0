"""Seeded inputs, and tensors as one printed line each, to compare two runs by their bytes."""

import hashlib

import torch


def seeded(*shape, dtype=torch.float32, seed=0):
    """Random numbers made on the CPU, so that they do not depend on the device."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).cuda()


def show(name, *tensors):
    h = hashlib.sha256()
    for t in tensors:
        assert torch.isfinite(t).all() if t.is_floating_point() else True, f"{name}: not finite"
        h.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print(name, h.hexdigest()[:32])
