"""A training loop of one's own round a planned step: warm-up, clipping, accumulation over batches.

python examples/own_loop.py
"""

import torch
from torch import nn

import steelyard as sy

BATCHES_PER_UPDATE = 2


def loss(model, batch):
    pictures, classes = batch
    return nn.functional.cross_entropy(model(pictures), classes)


def picture_net():
    layers = []
    for inside, outside in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def main(updates=6):
    torch.manual_seed(0)
    model = picture_net()
    data = [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(8)]

    plan = sy.plan(model, loss, data[0], budget=sy.Budget(memory="12 MiB"))
    print(plan)
    step = plan.apply(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    losses = []
    for update in range(updates):
        optimizer.zero_grad()
        for part in range(BATCHES_PER_UPDATE):
            batch = data[(update * BATCHES_PER_UPDATE + part) % len(data)]
            losses.append(float(step.backward(batch, scale=1 / BATCHES_PER_UPDATE)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
