"""ResNet-50 training steps: eager PyTorch, SGD with momentum, float32. The batch is random numbers on the device;
with --copy each step copies it there."""

import torch
import torchvision

from measure import arguments, feed, measure


def main():
    a = arguments(batch=32)
    torch.manual_seed(1)
    model = torchvision.models.resnet50().cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    batch = feed(a, torch.randn(a.batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (a.batch,), device="cuda"))

    def step():
        images, labels = batch()
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    measure("resnet50", a, step)


if __name__ == "__main__":
    main()
