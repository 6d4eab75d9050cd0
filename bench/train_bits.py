"""100 deterministic training steps of ResNet-50 and of a small MLP; every loss as a hexadecimal float.

Run natively and remotely, the two outputs must be the same bytes: same kernels,
same order, same results. Anything the machine decides goes to stderr.
"""

import argparse
import os
import sys
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts

import torch  # noqa: E402
import torchvision  # noqa: E402


def resnet50():
    return torchvision.models.resnet50(), torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,)), 0.02


def mlp():
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(512, 10))
    return model, torch.randn(256, 784), torch.randint(0, 10, (256,)), 0.05


def train(name, make, steps):
    torch.manual_seed(20240229)
    model, x, y, rate = make()
    model, x, y = model.cuda().train(), x.cuda(), y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    begun = time.perf_counter()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for i, loss in enumerate(losses):
        print(f"{name} {i} {loss.hex()}")
    # The weights too: a loss could agree by luck.
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().item()
    print(f"{name} weights {total.hex()}")
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {time.perf_counter() - begun:.1f} s", file=sys.stderr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--only", choices=["resnet50", "mlp"])
    a = p.parse_args()
    # An operation without a deterministic form is named on stderr and run anyway.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    for name, make in (("resnet50", resnet50), ("mlp", mlp)):
        if a.only in (None, name):
            train(name, make, a.steps)


if __name__ == "__main__":
    main()
