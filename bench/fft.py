#!/usr/bin/env python3
"""Transforms by cuFFT in PyTorch, and in CuPy where it is installed: a digest of every result's bits, and how far the
inverse is from the input. Natively and remotely the lines are the same."""
import hashlib

import torch

torch.manual_seed(1)
for shape in ((1024,), (1000,), (7919,), (64, 64), (30, 42, 70), (8, 4096), (1 << 20,)):
    for kind in (torch.complex64, torch.complex128):
        x = torch.randn(*shape, dtype=kind).cuda()
        y = torch.fft.fftn(x)
        z = torch.fft.ifftn(y)
        off = float((z - x).abs().max())
        print(shape, kind, hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()[:16], "inverse", "right" if off < 1e-4 else off)
    r = torch.randn(*shape).cuda()
    y = torch.fft.rfft(r)
    print(shape, "real", hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()[:16])
s = torch.stft(torch.randn(4, 16000).cuda(), n_fft=512, window=torch.hann_window(512).cuda(), return_complex=True)
print("stft", tuple(s.shape), hashlib.sha256(s.cpu().numpy().tobytes()).hexdigest()[:16])
try:
    import cupy
except ImportError:
    cupy = None
if cupy:
    a = cupy.arange(3000, dtype=cupy.complex64)
    print("cupy", hashlib.sha256(cupy.fft.fft(a).get().tobytes()).hexdigest()[:16])
