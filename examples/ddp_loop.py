"""A training loop of torch: DDP, AdamW with two parameter groups, a cosine schedule, clipping and accumulation.

    torchrun --nproc-per-node 2 examples/ddp_loop.py

`prepared_loop.py` is the same script, ported to this library.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, WIDTH, LENGTH = 64, 32, 16
BATCH, ACCUMULATE, EPOCHS, CLIP = 8, 2, 2, 0.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + torch.tanh(self.mix(self.norm(h))))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def report(number, loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{number:3} {total.item() / dist.get_world_size():.7f}")


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(LENGTH).add(torch.randint(WORDS, (128, 1))) % WORDS)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    updates = EPOCHS * len(data) // (dist.get_world_size() * BATCH * ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    model = DistributedDataParallel(model)
    for _ in range(EPOCHS):
        for number, (tokens,) in enumerate(loader, start=1):
            loss = loss_of(model, tokens) / ACCUMULATE
            loss.backward()
            report(number, loss)
            if number % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
