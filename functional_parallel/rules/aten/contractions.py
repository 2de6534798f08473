"""Rules of matrix products. A sharded contraction leaves partial sums; sharding of other dims passes through.

Products with a bias do not occur here. `partition.preparation` rewrites them to a product and a sum, so that the bias
is added once, after the sum over ranks.
"""

from __future__ import annotations

import torch

from ..registry import Rule, rule

aten = torch.ops.aten

rule([aten.mm.default], Rule("~i k+, ~k+ j -> i j"))
rule([aten.bmm.default], Rule("~b i k+, ~b k+ j -> b i j"))
rule([aten.mv.default], Rule("~i k+, ~k+ -> i"))
rule([aten.dot.default, aten.vdot.default], Rule("~k+, ~k+ -> ()"))
