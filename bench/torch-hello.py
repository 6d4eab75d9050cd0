"""The smallest PyTorch program worth running: a matrix product, checked on the CPU."""

import torch

torch.backends.cuda.matmul.allow_tf32 = False
a = torch.arange(64 * 48, dtype=torch.float64).reshape(64, 48) % 7
b = torch.arange(48 * 32, dtype=torch.float64).reshape(48, 32) % 5
c = (a.cuda() @ b.cuda()).cpu()
assert torch.equal(c, a @ b), "wrong product"
print("matmul right on", torch.cuda.get_device_name(0), "free/total", torch.cuda.mem_get_info())
