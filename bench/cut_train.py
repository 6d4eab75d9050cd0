"""Training steps with input from a DataLoader, for cuts.py: ResNet-50, or a small transformer.

cut_train.py resnet50|transformer --steps N OUT, or --seconds S for as many steps as these allow.

Prints "ready" when the first 20 steps are done, then each step as "step N", and writes into OUT as JSON every loss as a
hexadecimal float, the sum of the weights, and when each step ended by CLOCK_MONOTONIC, which all programs of a machine
have in common. The same steps have the same results to the bit, wherever they run. ResNet-50 asks for its loss at every step; the transformer's losses
stay on the device for ten steps, so that its calls wait rarely.
"""

import argparse
import json
import os
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts

import torch  # noqa: E402
from torch import nn  # noqa: E402

READY = 20


class Pictures(torch.utils.data.Dataset):
    """As many as are asked for, made of 64 random ones."""

    def __init__(self):
        self.made = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(18))

    def __len__(self):
        return 1 << 40

    def __getitem__(self, i):
        return self.made[i * 7 % 64].float() / 255, i * 31 % 1000


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 40

    def __getitem__(self, i):
        x = torch.randint(0, 8192, (257,), generator=torch.Generator().manual_seed(i))
        return x[:-1], x[1:]


class Transformer(nn.Module):
    def __init__(self, width=768, layers=6, length=256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(8192, width), nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 8192)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x):
        return self.out(self.layers(self.tokens(x) + self.places, mask=self.mask))


def resnet50():
    import torchvision

    return torchvision.models.resnet50(), Pictures(), 32, 1


def transformer():
    return Transformer(), Tokens(), 16, 10


def main():
    p = argparse.ArgumentParser()
    p.add_argument("name", choices=["resnet50", "transformer"])
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=0)
    p.add_argument("--seconds", type=float, default=0)
    a = p.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(20240229)
    model, data, batch, every = {"resnet50": resnet50, "transformer": transformer}[a.name]()
    model = model.cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = torch.utils.data.DataLoader(data, batch, sampler=range(1 << 40), num_workers=4, pin_memory=True, persistent_workers=True)
    losses, ends, kept = [], [], []
    begun = time.monotonic()
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x.cuda(non_blocking=True))
        loss = nn.functional.cross_entropy(out.flatten(0, -2), y.cuda(non_blocking=True).flatten())
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
        if len(kept) == every:
            losses += torch.stack(kept).tolist()
            kept = []
        ends.append(time.monotonic())
        if len(ends) >= READY:
            print("ready" if len(ends) == READY else f"step {len(ends)}", flush=True)
        if len(losses) == len(ends) and (len(ends) >= a.steps if a.steps else ends[-1] - begun > a.seconds):
            break
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().item()
    with open(a.out, "w") as f:
        json.dump({"losses": [v.hex() for v in losses], "weights": total.hex(), "begun": begun, "ends": ends}, f)


if __name__ == "__main__":
    main()
