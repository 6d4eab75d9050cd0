"""Ten steps of a small network with the loss read back after each: the loss must fall."""

import torch

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 64).cuda()
y = torch.randint(0, 10, (256,)).cuda()
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print("losses", " ".join(f"{v:.4f}" for v in losses))
