"""Sharding rules as text, in the notation that einops users read.

In `"i k+, k+ j -> i j"`, operands are left of the arrow and results right of it. There is one name per factor. A factor
that an operand is sharded on stays sharded in every pattern with that name. Marks define the effect on the others:

| mark | on | meaning |
|---|---|---|
| `k+` | a factor | sharding it leaves partial sums in the results that lack it |
| `k>`, `k<` | a factor | sharding it leaves partial maxima (minima), resolved immediately by pmax (pmin) |
| `k?` | a factor | an index selects along it: a rank looks up its shard and zeros the rest, leaving partial sums |
| `k!` | a factor | the op's own lowering combines the ranks; results that lack it are replicated |
| `k^` | a factor | must be replicated |
| `~` | an operand | the op is linear in this operand alone: it may carry partial sums if no other operand does |
| `&` | an operand | the op is linear in these operands together: they carry partial sums all or none |

Compound factors are parenthesised, `"(b s) h -> b s h"`. `...` represents any leading dims, broadcast as torch does.
`1` is a dim of size one, and `()` is a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from einops.parsing import ParsedExpression

from ..errors import RuleError

_MARKS = "+^<>?!"


@dataclass(frozen=True)
class Pattern:
    """Pattern of one operand or result: the factor names of each dim, outermost first. `...` is the dim `("...",)`."""

    dims: tuple[tuple[str, ...], ...]
    linear: str = ""  # "", "~" or "&"

    @property
    def ellipsis(self) -> int | None:
        return next((index for index, dim in enumerate(self.dims) if dim == ("...",)), None)

    def fit(self, shape: tuple[int, ...], where: str, *, ones: bool = False) -> tuple[tuple[str, ...], ...]:
        """Return the factors of each dim of a tensor of shape `shape`; () for a size-one dim under an ellipsis.

        Dims of the ellipsis are named from the right, the last is `.0`, so that broadcasting aligns them. `ones` is for
        operands that are not broadcast: dims of size one are named too, because an axis of one rank may split them.
        """
        position = self.ellipsis
        extra = len(shape) - len(self.dims) + (position is not None)
        if extra < 0 or (position is None and extra):
            raise RuleError(f"{where}: the rule has {len(self.dims)} dims for a tensor of shape {tuple(shape)}")
        if position is None:
            return self.dims
        sizes = shape[position : position + extra]
        filled = tuple((f".{extra - 1 - i}",) if ones or size != 1 else () for i, size in enumerate(sizes))
        return self.dims[:position] + filled + self.dims[position + 1 :]


@dataclass(frozen=True)
class RuleText:
    """Parsed rule: patterns of operands and results, and the mark of each factor.

    >>> rule = parse_rule("i k+, k+ j -> i j")
    >>> rule.marks
    {'k': '+'}
    >>> [pattern.dims for pattern in rule.operands]
    [(('i',), ('k',)), (('k',), ('j',))]
    """

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    marks: dict[str, str]


@lru_cache(maxsize=8192)
def parse_rule(text: str) -> RuleText:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"a rule has the form 'operands -> results'; there is no arrow in {text!r}")
    marks: dict[str, str] = {}
    operands = tuple(_pattern(part, marks, text) for part in _split(left))
    results = tuple(_pattern(part, marks, text) for part in _split(right))
    known = {name for pattern in operands for dim in pattern.dims for name in dim}
    for pattern in results:
        unknown = [name for dim in pattern.dims for name in dim if name not in known and not name.startswith("new")]
        if unknown:
            raise RuleError(
                f"{text!r}: a result names {', '.join(unknown)}, which no operand has (new dims are named new…)"
            )
    return RuleText(text, operands, results, marks)


def _split(side: str) -> list[str]:
    return [part.strip() for part in side.split(",")] if side.strip() else []


def _pattern(part: str, marks: dict[str, str], text: str) -> Pattern:
    linear = part[0] if part[:1] in ("~", "&") else ""
    body = _take_marks(part[len(linear) :], marks, text)
    if body in ("( )", ""):
        return Pattern((), linear)
    try:
        parsed = ParsedExpression(body, allow_underscore=True)
    except Exception as error:
        raise RuleError(f"{text!r}: {part!r} is not an einops pattern: {error}") from error
    dims = tuple(("...",) if axis == "…" else tuple(map(str, axis)) for axis in parsed.composition)
    return Pattern(dims, linear)


def _take_marks(body: str, marks: dict[str, str], text: str) -> str:
    words = body.replace("(", " ( ").replace(")", " ) ").split()
    for index, word in enumerate(words):
        if word[-1] in _MARKS:
            name, mark = word[:-1], word[-1]
            if marks.setdefault(name, mark) != mark:
                raise RuleError(f"{text!r}: factor {name} is marked both {marks[name]} and {mark}")
            words[index] = name
    return " ".join(words)
