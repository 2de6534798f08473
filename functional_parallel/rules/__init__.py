"""Sharding rules of ops: layouts along an axis, conversions, notation, table of rules, and rules of torch's ops."""

from sharding_specs.rules import for_model  # rules of the parameters of a model, for users who look here

from .aten.losses import cross_entropy
from .aten.norms import batch_norm, batch_norm_formula
from .aten.rearrangements import reshaped_place
from .axis_layout import PARTIAL, REDUCED, REPLICATED, AxisLayout, Owned, Reduced, Replicated, Shard, shard_shape
from .convert import REPLICATED_VARYING, TargetLayout, convert
from .decide import OperandInfo, OpSharding, SplitFactor, choose_sharding, factor_sizes, find_factor, placed
from .duplicates import mask_duplicates
from .op_context import OpContext
from .registry import Rule, lookup, register_rule, rule
from .rule_text import RuleText, parse_rule
from .texts import ndim_of, whole_along
