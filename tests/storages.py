"""Storages of shards for tests. A value that is not fetched or stored once too few or too often is another one."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sharding_specs import register_storage

register_storage("form", "negative", torch.neg, torch.neg)
register_storage("form", "copied", torch.clone, torch.clone)
register_storage("range", "double", lambda x: x * 2, lambda x: x / 2)

STORAGES = st.fixed_dictionaries(
    {}, optional={"form": st.sampled_from(["negative", "copied"]), "range": st.just("double")}
)
