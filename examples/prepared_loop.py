"""`ddp_loop.py` ported to this library: the same optimizer and scheduler, with ZeRO-1 in place of DDP.

    torchrun --nproc-per-node 2 examples/prepared_loop.py

It prints one line per update, where `ddp_loop.py` prints one per microbatch.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import functional_parallel as fp

WORDS, WIDTH, LENGTH = 64, 32, 16
BATCH, ACCUMULATE, EPOCHS, CLIP = 8, 2, 2, 0.5
PLAN = fp.chain(fp.zero(1, "data"), fp.accumulate(ACCUMULATE))


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
    loader = DataLoader(data, BATCH * ACCUMULATE, sampler=DistributedSampler(data, shuffle=False))
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    updates = EPOCHS * len(data) // (dist.get_world_size() * BATCH * ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    step = fp.prepare(model, optimizer, scheduler, loss=loss_of, plan=PLAN, clip=CLIP, batch="own")
    for _ in range(EPOCHS):
        for number, (tokens,) in enumerate(loader, start=1):
            loss = step(tokens)
            report(number, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
