"""Training steps of a small network, where the GPU has next to nothing to do: the cost is the calls'."""

from functools import partial

import torch

from measure import arguments, feed, measure


def trainer(device, batch, feed):
    """A function that does one training step on device and returns its loss. feed(x, y) takes the tensors of a batch
    there, and returns a function that gives a step its batch."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    give = feed(torch.randn(batch, 784, device=device), torch.randint(0, 10, (batch,), device=device))

    def step():
        x, y = give()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main():
    a = arguments(batch=64)
    measure("mlp", a, trainer("cuda", a.batch, partial(feed, a)))


if __name__ == "__main__":
    main()
