"""cuDNN through PyTorch: convolutions and recurrent layers, forward and backward, printed as digests."""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402

from digest import seeded, show  # noqa: E402


def both(name, layer, x):
    """Forward, then backward from a fixed gradient: output, input gradient, weight gradients."""
    torch.manual_seed(5)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.1)
    layer = layer.to(device="cuda", dtype=x.dtype)
    x = x.detach().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(seeded(*y.shape, dtype=y.dtype, seed=9))
    torch.cuda.synchronize()
    show(name, y, x.grad, *[p.grad for p in layer.parameters()])


def main():
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        both(f"conv2d 1x1 {short}", nn.Conv2d(64, 128, 1), seeded(8, 64, 28, 28, dtype=dtype))
        both(f"conv2d 3x3 {short}", nn.Conv2d(32, 64, 3, padding=1), seeded(8, 32, 56, 56, dtype=dtype))
        both(f"conv2d 7x7 stride 2 {short}", nn.Conv2d(3, 64, 7, stride=2, padding=3), seeded(8, 3, 224, 224, dtype=dtype))
        both(f"conv2d groups {short}", nn.Conv2d(64, 64, 3, groups=8), seeded(4, 64, 32, 32, dtype=dtype))
        both(f"batchnorm {short}", nn.BatchNorm2d(64), seeded(16, 64, 28, 28, dtype=dtype))
    both("conv1d", nn.Conv1d(16, 32, 5), seeded(4, 16, 1000))
    both("conv3d", nn.Conv3d(8, 16, 3), seeded(2, 8, 16, 24, 24))
    both("conv transpose", nn.ConvTranspose2d(32, 16, 4, stride=2), seeded(4, 32, 20, 20))
    both("lstm", nn.LSTM(64, 128, num_layers=2), seeded(30, 8, 64))
    both("gru", nn.GRU(64, 96, bidirectional=True), seeded(30, 8, 64))
    torch.backends.cudnn.allow_tf32 = False
    x, layer = seeded(2, 16, 20, 20, dtype=torch.float64), nn.Conv2d(16, 8, 3).double()
    want = layer(x.cpu())
    torch.testing.assert_close(layer.cuda()(x).cpu(), want)
    print("right; cuDNN", torch.backends.cudnn.version())


if __name__ == "__main__":
    main()
