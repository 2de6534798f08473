"""How an op is sharded: places and conversions, the notation and table of rules, and the rules of torch's ops."""

from . import aten
from .aten import VIEWS, batch_norm, cross_entropy, fuse_cross_entropy, reshaped_place
from .convert import VARYING, Form, convert
from .decide import Choice, Decision, Operand, decide, factor_sizes, find_factor, placed
from .duplicates import once
from .enumerated import note_enumerated
from .notation import RuleText, parse_rule
from .placement import PARTIAL, REDUCED, WHOLE, Place, Reduced, Shard, Whole
from .registry import Rule, is_elementwise, lookup, register_rule, rule
from .step import Step
from .texts import ndim_of, whole_along

__all__ = [
    "PARTIAL",
    "REDUCED",
    "VARYING",
    "VIEWS",
    "WHOLE",
    "Choice",
    "Decision",
    "Form",
    "Operand",
    "Place",
    "Reduced",
    "Rule",
    "RuleText",
    "Shard",
    "Step",
    "Whole",
    "aten",
    "batch_norm",
    "convert",
    "cross_entropy",
    "decide",
    "factor_sizes",
    "find_factor",
    "fuse_cross_entropy",
    "is_elementwise",
    "lookup",
    "ndim_of",
    "note_enumerated",
    "once",
    "parse_rule",
    "placed",
    "register_rule",
    "reshaped_place",
    "rule",
    "whole_along",
]
