"""Training steps of a small network, where the GPU has next to nothing to do: the cost is the calls'."""

import torch

from measure import arguments, feed, measure


def main():
    a = arguments(batch=64)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = feed(a, torch.randn(a.batch, 784, device="cuda"), torch.randint(0, 10, (a.batch,), device="cuda"))

    def step():
        x, y = batch()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    measure("mlp", a, step)


if __name__ == "__main__":
    main()
