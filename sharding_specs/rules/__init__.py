"""Rules that assign specs by path, and ready rules of well-known models."""

from .for_model import for_model
from .matching import (
    RuleMatch,
    apply_rules,
    match_rules,
    matches,
    matches_within,
    nearest,
    optional,
    prefixes,
)
from .ready import bert, gpt2, llama, vit

__all__ = [
    "RuleMatch",
    "apply_rules",
    "bert",
    "for_model",
    "gpt2",
    "llama",
    "match_rules",
    "matches",
    "matches_within",
    "nearest",
    "optional",
    "prefixes",
    "vit",
]
