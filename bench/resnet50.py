"""ResNet-50 training steps: eager PyTorch, SGD with momentum, float32, batch on the device."""

import torch
import torchvision

from measure import arguments, measure


def main():
    a = arguments(batch=32)
    torch.manual_seed(1)
    model = torchvision.models.resnet50().cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    images = torch.randn(a.batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (a.batch,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    measure("resnet50", a, step)


if __name__ == "__main__":
    main()
