"""`ddp_resnet.py` ported to this library: the same module, optimizer, schedule and batch norm.

    torchrun --nproc-per-node 2 examples/prepared_resnet.py --folder /tmp/prepared_resnet

The running statistics are a part of the training state, and so of the checkpoints. `--sync` runs on CPUs too.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import functional_parallel as fp

CLASSES, SIZE, WIDTH = 10, 8, 8


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip = nn.Sequential()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks = nn.Sequential(Block(WIDTH, WIDTH, 1), Block(WIDTH, 2 * WIDTH, 2))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def digits(count, seed):
    shapes = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    return TensorDataset(shapes[labels] + torch.randn(count, 1, SIZE, SIZE, generator=draw), labels)


def loss_of(model, images, labels):
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)


def right_of(model, images, labels):
    return (model(images).argmax(1) == labels).sum()


def summed(value):
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="samples per rank")
    parser.add_argument("--sync", action="store_true", help="batch norm by the statistics of all ranks")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = digits(256, seed=1), digits(64, seed=2)
    loader = DataLoader(train, args.batch, sampler=DistributedSampler(train, shuffle=False), drop_last=True)
    tests = DataLoader(test, args.batch, sampler=DistributedSampler(test, shuffle=False))
    model = ResNet()
    if args.sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    step, first = fp.prepare(model, optimizer, scheduler, loss=loss_of, batch="own", ema=0.9), 0
    if args.resume:
        step.state = step.train.restore(args.folder)
        first = step.state.step // len(loader)
    for epoch in range(first, args.epochs):
        for images, labels in loader:
            loss = step(images, labels)
            mean = summed(loss) / dist.get_world_size()
            if dist.get_rank() == 0:
                print(f"{epoch} loss {mean:.7f}", flush=True)
        average = step.module(ema=True).eval()
        with torch.no_grad():
            right = sum(summed(right_of(average, images, labels)) for images, labels in tests)
        if dist.get_rank() == 0:
            print(f"{epoch} right {right / len(test):.3f}", flush=True)
        step.train.save(step.state, args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
