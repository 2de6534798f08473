"""nn.Modules as functions: fused QKV, batch norm's running statistics, tied weights."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from einops import rearrange
from torch import nn

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

HEADS, DIM = 4, 4
WIDTH = HEADS * DIM


class Attention(nn.Module):
    """GPT-2's: one matrix makes queries, keys and values; heads are an inner factor of its columns."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.c_attn = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH, dtype=torch.float64) / 4)
        self.bias = nn.Parameter(torch.randn(3 * WIDTH, dtype=torch.float64))
        self.c_proj = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(x @ self.c_attn + self.bias, "b t (three h d) -> three b h t d", three=3, h=HEADS)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / DIM**0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
        return rearrange(mixed, "b h t d -> b t (h d)") @ self.c_proj


RULES = {"c_attn": "embed (3 heads/tensor dim)", "bias": "(3 heads/tensor dim)", "c_proj": "(heads/tensor dim) embed"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(tensor=4), Mesh(data=2, tensor=2)], ids=str)
def test_a_fused_query_key_value_matrix(mesh: Mesh, fused: bool) -> None:
    """A spec may split an inner factor of a dim; one psum forward and one backward, and nothing is gathered."""
    torch.manual_seed(0)
    fn, params = fp.functional(Attention(fused))

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return fn(params, x * 1.5).square().mean()

    data = [fp.zero(3, "data")] if "data" in mesh.axis_names else []
    plan = fp.chain(fp.tensor_parallel("tensor", RULES, strict=True), *data)
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    step = fp.testing.assert_equivalent(loss, plan, mesh, params, x, rtol=1e-12)
    assert {key: n for key, n in step.program.counts().items() if key[1] == ("tensor",)} == {("psum", ("tensor",)): 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=4)], ids=str)
def test_running_statistics_are_the_whole_batchs(mesh: Mesh) -> None:
    """Buffers go in and out as state; under a sharded batch they are what one device would have."""
    torch.manual_seed(0)
    module = Net().double().train()
    fn, params, state = fp.functional(module, buffers=True)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        logits, new = fn(params, state, x)
        return nn.functional.cross_entropy(logits, y), new

    x, y = torch.randn(8, 2, 5, 5, dtype=torch.float64), torch.arange(8) % 3
    plan = fp.data_parallel("data", batch=(P("data"), P("data"), P()))
    step = fp.compile(fp.grad_and_value(plan(loss), has_aux=True), mesh)
    grads, (value, new) = step(params, x, y, state)
    want_grads, (want, want_new) = fp.grad_and_value(loss, has_aux=True)(params, x, y, state)
    torch.testing.assert_close((grads, value, new), (want_grads, want, want_new), rtol=1e-12, atol=1e-13)
    module(x)
    torch.testing.assert_close(new["norm.running_var"], module.norm.running_var, rtol=1e-12, atol=1e-13)
    assert int(new["norm.num_batches_tracked"]) == 1


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=4)], ids=str)
def test_spectral_norm_takes_its_steps(mesh: Mesh) -> None:
    """Its power iteration writes with `out=`, into buffers."""
    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3).double().train())
    fn, params, state = fp.functional(module, buffers=True)

    def loss(params: Any, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        result, new = fn(params, state, x)
        return result.square().mean(), new

    x, plan = torch.randn(8, 4, dtype=torch.float64), fp.zero(2, "data", batch=(P("data"), P()))
    grads, (value, new) = fp.compile(fp.grad_and_value(plan(loss), has_aux=True), mesh)(params, x, state)
    module(x).square().mean().backward()
    torch.testing.assert_close(value, loss(params, x, state)[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(new, dict(module.named_buffers()), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        grads, {name: parameter.grad for name, parameter in module.named_parameters()}, rtol=1e-10, atol=1e-13
    )


def test_statistics_that_would_be_lost_are_refused() -> None:
    fn, params = fp.functional(Net().train())
    with pytest.raises(ValueError, match=r"for a module's buffers: fp.functional\(module, buffers=True\)"):
        fp.compile(fp.data_parallel("data")(lambda p, x: fn(p, x).sum()), Mesh(data=2))(params, torch.randn(4, 2, 5, 5))


def test_a_tied_weight_is_one_leaf_whose_gradients_are_summed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, dtype=torch.float64)
            self.head = nn.Linear(4, 8, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    fn, params = fp.functional(Tied())
    assert list(params) == ["embed.weight"]

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(fn(params, tokens), tokens)

    plan = fp.chain(fp.tensor_parallel("tensor", {"embed.weight": P("tensor")}), fp.zero(3, "data"))
    step = fp.testing.assert_equivalent(loss, plan, Mesh(data=2, tensor=2), params, torch.arange(8), rtol=1e-12)
    assert step.program.counts()[("psum_scatter", ("data",))] == 1


def test_a_module_in_another_mode_is_traced_anew() -> None:
    """Each mode has its program; nothing else is traced again, and what runs is what the module would do."""
    traced = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)
            self.norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            traced.append(self.training)
            return self.norm(self.linear(x)) * (1 if self.linear.training else 3)

    module = Scaled()
    fn, params = fp.functional(module)
    loss = fp.data_parallel("data")(lambda params, x: fn(params, x).square().mean())
    compiled = fp.compile(loss, Mesh(data=2))
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2))
    state, x = train.init(params), torch.randn(8, 4, dtype=torch.float64)
    for training in (True, False, True, False):
        module.linear.train(training)
        torch.testing.assert_close(compiled(params, x), fn(params, x).square().mean())
        expected = fn(train.params(state), x).square().mean()
        state, metrics = train(state, x)
        torch.testing.assert_close(metrics.loss, expected)
    calls_of_this_test = 8
    assert len(traced) - calls_of_this_test == 4, "two programs, in two modes"


@pytest.mark.parametrize("buffers", [False, True])
def test_a_frozen_parameter_stays_as_it_is(buffers: bool) -> None:
    """It is no leaf, so that neither a gradient nor the decay of weights reaches it; a hand may still pass it in."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    module[0].requires_grad_(False)
    fn, params, *state = fp.functional(module, buffers=buffers)
    assert sorted(params) == ["2.bias", "2.weight"]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        result = fn(params, *state, x)
        return (result[0] if buffers else result).square().mean()

    x = torch.randn(8, 4, dtype=torch.float64)
    fp.testing.assert_equivalent(loss, fp.zero(3, "data"), Mesh(data=2), params, x, rtol=1e-12)
    train = fp.train_step(loss, fp.optim.adamw(0.1, weight_decay=0.1), Mesh(data=2), fp.zero(3, "data"))
    trained, _ = train(train.init(params), x)
    head = {name[2:]: value for name, value in train.params(trained).items()}
    frozen = torch.tanh(module[0](x))
    torch.testing.assert_close(
        loss(train.params(trained), x), torch.func.functional_call(module[2], head, frozen).square().mean()
    )
    zeros = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    assert loss(zeros, x) == 0


def test_a_model_for_inference_has_all_its_parameters() -> None:
    fn, params = fp.functional(nn.Linear(4, 2).double().requires_grad_(False))
    assert sorted(params) == ["bias", "weight"]
    split, x = fp.tensor_parallel("tensor", {"*": P("tensor")}), torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(fp.compile(split(fn), Mesh(tensor=2))(params, x), fn(params, x))


@pytest.mark.parametrize(
    "plan", [pytest.param(fp.data_parallel("data"), marks=pytest.mark.slow), fp.zero(3, "data")], ids=str
)
@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4, batch_first=True, bidirectional=True),
        nn.GRU(4, 4, batch_first=True),
        nn.RNN(4, 4, batch_first=True),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True)),
        nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_write_through_views(module: nn.Module, plan: Any) -> None:
    fn, params = fp.functional(module.double())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        result = fn(params, x)
        return (result[0] if isinstance(result, tuple) else result).sin().sum()

    x = torch.randn(4, 3, 4, dtype=torch.float64)
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), params, x, rtol=1e-12)


@pytest.mark.parametrize("cell", [nn.LSTMCell(4, 4), nn.GRUCell(4, 4)], ids=lambda cell: type(cell).__name__)
def test_cells_that_write_through_views(cell: nn.Module) -> None:
    fn, params = fp.functional(cell.double())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        result = fn(params, x)
        return sum(state.sin().sum() for state in (result if isinstance(result, tuple) else [result]))  # type: ignore

    x = torch.randn(8, 4, dtype=torch.float64)
    fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=2), params, x, rtol=1e-12)


@pytest.mark.parametrize("weights", [False, True])
def test_what_torchs_attention_calls_is_seen(weights: bool) -> None:
    """`F.multi_head_attention_forward` hands itself to a mode first; what it calls is replaced all the same."""
    fn, params = fp.functional(nn.MultiheadAttention(8, 2, batch_first=True))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(params, x, x, x, need_weights=weights)[0].square().sum()

    x = torch.randn(4, 6, 8)
    step = fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=2), params, x)
    assert set(step.program.counts()) == {("psum", ("data",))}


def attending(params: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    heads = (x @ params["w"]).unflatten(-1, (2, -1)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(query=heads, key=heads, value=heads * 2, **options).sin().sum()


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("inner", [False, True])
def test_attention_by_torchs_keywords(options: dict[str, Any], inner: bool) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        if not inner:
            return attending(params, x, **options)
        return torch.func.grad(lambda x: attending(params, x, **options))(x).square().sum()

    def keyed(params: Any, x: torch.Tensor) -> torch.Tensor:
        with fp.random.using(fp.random.key(0)):
            return loss(params, x)

    params, x = {"w": torch.randn(8, 8, dtype=torch.float64)}, torch.randn(4, 6, 8, dtype=torch.float64)
    sharded = fp.zero(3, "data")(keyed)
    one, two = (fp.compile(fp.grad_and_value(sharded), Mesh(data=size))(params, x) for size in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-11, atol=1e-12)
    if not options.get("dropout_p"):
        torch.testing.assert_close(one[1], loss(params, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_takes_a_mask_or_is_causal(dropout_p: float) -> None:
    params, x = {"w": torch.randn(8, 8)}, torch.randn(4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool)

    def both_given(params: Any, x: torch.Tensor) -> torch.Tensor:
        return attending(params, x, attn_mask=mask, is_causal=True, dropout_p=dropout_p)

    both = fp.compile(fp.data_parallel("data")(both_given), Mesh(data=2))
    with pytest.raises(ValueError, match="attn_mask or is_causal=True, not both"):
        both(params, x)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_transformer_layers(layer: Any) -> None:
    fn, params = fp.functional(layer(8, 2, 16, dropout=0.0, batch_first=True).double())
    memory = [] if layer is nn.TransformerEncoderLayer else [torch.randn(4, 5, 8, dtype=torch.float64)]

    def loss(params: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return fn(params, *inputs).sin().sum()

    x = torch.randn(4, 6, 8, dtype=torch.float64)
    fp.testing.assert_equivalent(loss, fp.zero(3, "data"), Mesh(data=2), params, x, *memory, rtol=1e-11)


@pytest.mark.parametrize("padding", [None, pytest.param(3, marks=pytest.mark.slow), -9])
@pytest.mark.parametrize("spec", [P(None, "tensor"), P("tensor")], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length(mode: str, spec: P, padding: int | None) -> None:
    fn, params = fp.functional(nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding).double())
    plan = fp.chain(fp.tensor_parallel("tensor", {"weight": spec}), fp.zero(3, "data"))
    bags = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 7, 1], [3, 3, 3]])
    fp.testing.assert_equivalent(
        lambda p, bags: fn(p, bags).sin().sum(), plan, Mesh(data=2, tensor=2), params, bags, rtol=1e-12
    )


def test_bags_that_are_refused() -> None:
    fn, params = fp.functional(nn.EmbeddingBag(9, 4))
    step = fp.compile(fp.data_parallel("data", batch=P())(lambda p, x, at: fn(p, x, at).sum()), Mesh(data=2))
    with pytest.raises(ValueError, match="bags of one length"):
        step(params, torch.arange(8), torch.tensor([0, 3]))


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.zero(3, "data")], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["forward", "derivative inside"])
@pytest.mark.parametrize("dims", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_global_average_of_what_lies_channels_last(dims: int, inside: bool, plan: Any) -> None:
    """torch relabels strides of its mean then, in place."""
    pool = [nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d][dims - 1](1)

    def score(x: torch.Tensor) -> torch.Tensor:
        return pool(x.movedim(-1, 1) * 4).square().sum()

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(score)(x * weight).square().sum() if inside else score(x * weight)

    x = torch.arange(4.0 * 2**dims * 3, dtype=torch.float64).reshape(4, *[2] * dims, 3)
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), torch.arange(3.0, dtype=torch.float64), x, exact=True)


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.zero(3, "data")], ids=str)
def test_values_that_torch_would_check(plan: Any) -> None:
    """Distributions and one loss ask whether all values are valid, which a trace cannot say."""

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        normal, given = torch.distributions.Normal(y, y.exp()), torch.distributions.Normal(0.0, 1.0)
        likelihood = normal.log_prob(y.detach()) + torch.distributions.Categorical(logits=y).entropy()[:, None]
        losses = [
            nn.functional.gaussian_nll_loss(y, y.sin(), variance, full=full, eps=0.5, reduction=reduction)
            for variance, full, reduction in [
                (y.square(), True, "mean"),
                (y[:, :1].exp(), False, "sum"),
                (y[:, 0].exp(), False, "none"),
                (2.0, False, "none"),
            ]
        ]
        divergence = torch.distributions.kl_divergence(normal, given)
        return likelihood.sum() + divergence.mean() + sum(each.sum() for each in losses)

    weight, x = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), weight, x, rtol=1e-12)


def test_a_mask_that_torch_would_look_at() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    fn, params = fp.functional(nn.TransformerEncoder(layer, 1))
    plan, x = fp.zero(3, "data", batch=(P("data"), P())), torch.randn(4, 6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"to detect a causal mask; pass is_causal="):
        fp.compile(plan(lambda p, x, mask: fn(p, x, mask=mask).sum()), Mesh(data=2))(params, x, mask)
    plan = fp.zero(3, "data")
    for causal in (True, False, None):  # a mask that is closed over is known
        loss = lambda p, x, causal=causal: fn(p, x, mask=mask, is_causal=causal).sin().sum()  # noqa: E731
        fp.testing.assert_equivalent(loss, plan, Mesh(data=2), params, x, rtol=1e-11)


def test_a_distribution_whose_check_is_refused() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
        covariance = weight.mT @ weight + torch.eye(2, dtype=torch.float64)
        gaussian = torch.distributions.MultivariateNormal(x @ weight, covariance, **options)
        return gaussian.log_prob(x[:, :2]).sum()

    weight, x = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="validate_args=False"):
        fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))(weight, x)
    unchecked = lambda weight, x: loss(weight, x, validate_args=False)  # noqa: E731
    fp.testing.assert_equivalent(unchecked, fp.data_parallel("data"), Mesh(data=2), weight, x, rtol=1e-12)


@pytest.mark.parametrize("read", [torch.Tensor.numpy, numpy.asarray], ids=["numpy", "asarray"])
def test_values_read_into_numpy(read: Any) -> None:
    """Of a constant they are there; under the modes of a trace torch hands out memory that was never written."""
    constant, x = torch.tensor(2.0), torch.ones(4, 2)

    def compiled(f: Any) -> Any:
        return fp.compile(fp.data_parallel("data")(f), Mesh(data=2))(torch.ones(2), x)

    assert compiled(lambda w, x: (x @ w).sum() * read(constant).item()) == 16
    with pytest.raises(
        ValueError, match=r"test_modules\.py:\d+: numpy needs a tensor's values, .* write it with torch"
    ):
        compiled(lambda w, x: (x @ w).sum() * read(x @ w).sum())


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.zero(3, "data")], ids=repr)
def test_a_table_with_sparse_gradients_has_dense_ones(plan: Any) -> None:
    torch.manual_seed(0)
    sparse = nn.Embedding(10, 4, padding_idx=1, sparse=True).double()
    dense = nn.Embedding.from_pretrained(sparse.weight.detach().clone(), freeze=False, padding_idx=1)
    tokens, steps = torch.arange(24).reshape(8, 3) * 7 % 10, []
    for table in (sparse, dense):
        fn, params = fp.functional(table)
        loss = lambda params, tokens, fn=fn: fn(params, tokens).sin().mean()  # noqa: E731
        train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan)
        state, _ = train(train.init(params), tokens)
        steps.append(train.params(state)["weight"])
    assert torch.equal(*steps)


def test_a_table_that_changes_where_it_is_looked_up() -> None:
    fn, params = fp.functional(nn.Embedding(10, 4, max_norm=1.0))
    step = fp.compile(fp.grad(fp.data_parallel("data")(lambda p, x: fn(p, x).sum())), Mesh(data=2))
    with pytest.raises(TracingError, match=r"embedding\(max_norm=1.0\) changes the table in place.*clamp\(max=1\)"):
        step(params, torch.arange(4))
