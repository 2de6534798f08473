"""Names that the snippets of the migration page use. The page shows these lines."""

import tempfile
from functools import partial

import torch
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh, P, rules, shard, unshard  # noqa: F401


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


torch.manual_seed(0)
module = Model()
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
x, y = torch.randn(8, 4), torch.randn(8, 4)
mesh, plan = Mesh(data=2), fp.data_parallel("data")
step = fp.prepare(module, optimizer, scheduler, loss=loss_of, mesh=mesh, plan=plan)

fn, params = fp.functional(module)  # for a script that is written with functions


def loss(params, x, y):
    return loss_of(partial(fn, params), x, y)


def language_model(params, cache, tokens, positions):  # logits of the next token, and the new cache
    cache = cache.scatter(1, positions, tokens)
    is_past = torch.arange(cache.shape[1]) <= positions[..., None]
    return params[torch.where(is_past, cache[:, None], 0).sum(-1) % 8], cache


def empty_cache(params, rows, length):
    return torch.zeros(rows, length, dtype=torch.int64)


adamw = fp.optim.adamw(1e-2)
train = fp.train_step(loss, adamw, mesh, plan)
state = train.init(params)
folder = tempfile.mkdtemp()


def small_llama():  # a Hugging Face folder
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    return folder
