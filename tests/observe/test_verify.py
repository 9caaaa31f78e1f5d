"""``verify`` finds models that train otherwise when they are sharded, and leaves them as they are.

Faults are planted in modules. ``is_sharded`` tells them whether they are in the sharded copy, so
that a fault of the sharding itself can be imitated.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.nn import functional

import fsdp_ext
from fsdp_ext.sharding.params.ownership import own_grad_dtype
from fsdp_ext.verifier import expected_gradients
from fsdp_ext.verifier.comparison import difference
from fsdp_ext.verifier.expected_gradients import Reduction
from fsdp_ext.verifier.result import Check
from fsdp_ext.verifier.subject import Subject

WIDTH = 6


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, fsdp_ext.FSDPModule)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Lively(Block):
    """Draws random numbers in forward, writes into buffers, and has an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(super().forward(x)))


class ReusedEarly(Block):
    """Its slot is given to the next gather while the unit still runs."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if is_sharded(self):
            self.second.weight.data.fill_(0.5)
        return x + cast(Tensor, self.second(h))


class ChangesInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.mul_(0.9)
        return super().forward(x)


class KnowsParameters(Block):
    """Looks parameters up by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {self.first.weight: 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[self.first.weight]


class KeepsAnAlias(Block):
    """Uses a parameter through a second reference, which sharding does not replace."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(x, self.aliases[0])


class Unsteady(Block):
    calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(Unsteady.calls))


class SkippedByOneRank(Block):
    pass


class Model(nn.Module):
    """Three blocks, the one in the middle of a class that is given."""

    def __init__(self, cls: type[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), cls(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            if not (isinstance(layer, SkippedByOneRank) and is_sharded(self) and dist.get_rank()):
                x = layer(x)
        return cast(Tensor, self.head(x)) * scale


def make(cls: type[Block]) -> Model:
    torch.manual_seed(0)
    return Model(cls)


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def verify(cls: type[Block] = Lively, **settings: Any) -> fsdp_ext.Verification:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    settings = {"units": Block, "loss": square, "verbose": False, **settings}
    return fsdp_ext.verify(make(cls), batch, **settings)


def alone(function: Callable[[], Any]) -> Any:
    """Call the function without a process group, as in a script that was not launched."""
    dist.destroy_process_group()
    try:
        result = function()
        assert not dist.is_initialized()
        return result
    finally:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


# - Models that train right


def assert_all_equal(result: fsdp_ext.Verification, ranks: int, *, is_exact: bool = True) -> None:
    assert result.ok, str(result)
    assert result.ranks == ranks
    assert [check.ok for check in result.checks] == [True] * len(result.checks)
    assert all(check.values > 0 for check in result.checks)
    assert all(check.is_exact for check in result.checks) or not is_exact
    assert "trains as it does unsharded" in str(result)


def verify_alone() -> None:
    result = verify()
    assert_all_equal(result, 1)
    text = " ".join(str(result).split())
    assert "(4 units, 1 rank over " in text
    assert "Start the script with torchrun to check that over several ranks." in text


def test_a_model_verifies_in_one_process() -> None:
    run_ranks(alone, 1, verify_alone, fresh=True)


def verify_with_settings(more: bool) -> None:
    narrow = fsdp_ext.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    result = verify(Block, mp_policy=narrow)
    assert_all_equal(result, 2)
    assert "torchrun" not in str(result)
    one_unit = verify(units=None)
    assert one_unit.ok
    assert [c.detail for c in one_unit.checks if c.ok is None] == ["the model is one unit"]
    if not more:
        return
    widened = fsdp_ext.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    assert verify(Block, mp_policy=widened, units=None).ok
    assert_all_equal(verify(reshard_after_forward=False, bucket_bytes=0, prefetch=2), 2)
    assert_all_equal(verify(max_message_bytes=400), 2)


@pytest.mark.parametrize("more", [False, *exhaustive(True)])
def test_a_model_verifies_with_settings(more: bool) -> None:
    run_ranks(verify_with_settings, 2, more)


def verify_in_the_group(transport: str, dtype: torch.dtype) -> None:
    torch.manual_seed(dist.get_rank())
    batch = {"x": torch.randn(4, WIDTH, dtype=dtype, requires_grad=True), "scale": 2.0}
    model = make(Lively).to(dtype)
    result = fsdp_ext.verify(
        model, batch, loss=square, units=Block, transport=transport, verbose=False
    )
    # gloo's own reductions add more than two ranks in another order. Composed ones do not.
    is_exact = transport == "shared_memory" or dist.get_world_size() <= 2
    assert_all_equal(result, dist.get_world_size(), is_exact=is_exact)
    assert result.checks[1].transport == transport


@pytest.mark.parametrize("ranks", [2, *exhaustive(1, 3, 4)])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive(torch.float64)])
def test_a_model_verifies_on_all_ranks_of_a_group(
    ranks: int, transport: str, dtype: torch.dtype
) -> None:
    run_ranks(verify_in_the_group, ranks, transport, dtype)


def verify_grad_dtypes() -> None:
    policies = [None, fsdp_ext.MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    for grad_dtype, policy in zip((torch.bfloat16, torch.float32), policies, strict=True):
        model = make(Block).to(torch.float32 if policy is None else torch.bfloat16)
        for param in model.layers[1].parameters():
            param.grad_dtype = grad_dtype
        copies: list[nn.Module] = []
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(
            model.head.weight.dtype
        )
        plain = Subject.plain

        def noted(self: Subject, *args: Any, plain: Any = plain, copies: Any = copies) -> Any:
            copies.append(plain(self, *args))
            return copies[-1]

        vars_of_class: Any = Subject
        vars_of_class.plain = noted
        try:
            settings = {} if policy is None else {"mp_policy": policy}
            result = fsdp_ext.verify(
                model, batch, loss=square, units=Block, verbose=False, **settings
            )
        finally:
            vars_of_class.plain = plain
        assert_all_equal(result, dist.get_world_size())
        assert copies
        for copied in copies if policy is None else ():  # others compute with cast parameters
            assert own_grad_dtype(cast(Any, copied).layers[1].first.weight) == grad_dtype


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="not in this PyTorch")
def test_copies_have_the_grad_dtype_of_the_model() -> None:
    run_ranks(verify_grad_dtypes, 2)


def verify_in_any_order() -> None:
    is_exact = expected_gradients._is_exact
    expected_gradients._is_exact = lambda root, dtype: False
    try:
        result = verify()
    finally:
        expected_gradients._is_exact = is_exact
    assert result.ok, str(result)
    assert not result.checks[1].is_exact
    assert "equal up to rounding" in str(result)


def test_gradients_are_compared_within_a_bound_where_the_order_of_additions_is_unknown() -> None:
    run_ranks(verify_in_any_order, 2)


def verify_where_rounding_is_large() -> None:
    is_exact, bound = expected_gradients._is_exact, Reduction._relative_bound
    patched: Any = Reduction
    expected_gradients._is_exact = lambda root, dtype: False
    patched._relative_bound = lambda self, ranks: 1.0  # as of many ranks
    narrow = fsdp_ext.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    try:
        result = verify(Block, mp_policy=narrow)
    finally:
        expected_gradients._is_exact = is_exact
        patched._relative_bound = bound
    assert result.ok, str(result)
    assert result.checks[1].is_exact  # losses and parameters
    text = " ".join(str(result).split())
    assert "unsharded, except gradients, which were not tried (4 units, 2 ranks" in text
    assert "equal; gradients not tried" in text
    assert (
        "the rounding of an average over 2 ranks in torch.bfloat16 may hide a rank that is" in text
    )


def test_gradients_whose_rounding_could_hide_a_rank_are_not_tried() -> None:
    run_ranks(verify_where_rounding_is_large, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_holds_for_any_order_and_not_for_a_wrong_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(500, generator=generator).to(dtype) for _ in range(7)]
    reduction = Reduction(1 / 7, 1.0, dtype, dtype, is_exact=False)
    assert not reduction.untried(7)
    bound = reduction.bound(gradients, gradients[0])
    expected = reduction.result(gradients, gradients[0])
    orders = [list(torch.randperm(7, generator=generator)) for _ in range(20)]
    for order in orders:
        permuted = [gradients[i] for i in order]
        # The second one is rounded after each addition.
        added = sum((gradient.float() / 7).to(dtype) for gradient in permuted)
        for other in (reduction.result(permuted, gradients[0]), cast(Tensor, added)):
            assert bool(((other.double() - expected.double()).abs() <= bound).all())
    lacking = reduction.result([*gradients[:-1], None], gradients[0])
    assert bool(((lacking.double() - expected.double()).abs() > bound).float().mean() > 0.5)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_tried_where_a_missing_rank_shows(grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for ranks in (2, 8, 64):
            gradients = [torch.randn(500, generator=generator).abs() for _ in range(ranks)]
            reduction = Reduction(1.0, 1 / ranks, dtype, grad_dtype, is_exact=False)
            expected = reduction.result(gradients, gradients[0]).double()
            lacking = reduction.result([*gradients[:-1], None], gradients[0]).double()
            bound = reduction.bound(gradients, gradients[0])
            if not reduction.untried(ranks):
                assert bool(((lacking - expected).abs() > bound).float().mean() > 0.5)
    assert not Reduction(1.0, 1.0, torch.float32, torch.float32, is_exact=False).untried(64)
    assert not Reduction(1.0, 1.0, torch.bfloat16, grad_dtype, is_exact=True).untried(64)
    narrow = Reduction(1.0, 1.0, torch.bfloat16, grad_dtype, is_exact=False)
    assert "an average over 64 ranks in torch.bfloat16 may hide a rank" in narrow.untried(64)
    assert not narrow.untried(7)
    assert bool(narrow.untried(8)) == (grad_dtype == torch.bfloat16)


def test_a_difference_is_told_in_words() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    seen = expected.clone()
    assert difference(expected, seen, equal_nan=True) == difference(None, None) == ""
    assert (
        difference(expected, seen) == "differs in 1 of 4 values, first at [1, 1]: nan, expected nan"
    )
    seen[0, 1] = 2.5
    words = "differs in 1 of 4 values, first at [0, 1]: 2.5, expected 2"
    assert difference(expected, seen, equal_nan=True) == words
    assert difference(expected, None) == "is None, not (2, 2) torch.float32"
    assert difference(expected, seen[0].half()) == "is (2,) torch.float16, not (2, 2) torch.float32"
    one, bound = torch.tensor(1.0), torch.tensor(0.25)
    assert difference(one, one + 0.25, bound) == ""
    words = "differs in 1 of 1 values, by up to 0.5, first: 1.5, expected 1"
    assert difference(one, one + 0.5, bound) == words
    infinite = one * torch.inf  # and so is a bound that is relative to it
    assert difference(infinite, infinite, infinite) == ""
    assert "first: 1, expected inf" in difference(infinite, one, infinite)


# - Faults


def failed(result: fsdp_ext.Verification) -> Check:
    assert not result.ok
    check = result.first_difference
    assert check is not None
    assert "DIFFERS" in str(result)
    assert check.detail.splitlines()[0] in " ".join(str(result).split())
    return check


def find_planted_faults() -> None:
    check = failed(verify(ReusedEarly))
    assert check.name == "two steps, beside the unsharded model"
    assert check.detail.startswith("the loss: the value differs in 1 of 1 values"), check.detail
    assert check.parameter == "layers.0.first.weight"

    check = failed(verify(ChangesInPlace))
    assert check.parameter == "layers.1.second.weight"
    assert "the parameter after the step differs in" in check.detail

    check = failed(verify(KnowsParameters))
    assert check.detail.startswith("rank 0 raised KeyError")
    check = failed(verify(KeepsAnAlias))
    assert check.name == "two steps, beside the unsharded model"

    result = verify(Unsteady)
    check = failed(result)
    assert check.name == "the unsharded model, twice"
    assert check.detail.startswith("the loss: the second run differs")


def test_planted_faults_are_found_and_the_first_parameter_is_named() -> None:
    run_ranks(find_planted_faults, 2, fresh=True)


def find_a_skipped_unit() -> tuple[bool, str]:
    result = verify(SkippedByOneRank, bucket_bytes=0)
    assert [check.ok for check in result.checks[2:]] == [None] * 4, str(result)
    return result.ok, failed(result).detail


def test_a_rank_that_skips_a_unit_is_found_on_all_ranks() -> None:
    first, second = run_ranks(find_a_skipped_unit, 2, fresh=True)
    assert first == second
    assert "issues the all-gather of unit 'layers.1'" in first[1]


# - The model afterwards


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Any]:
    params = [(p, p.detach().clone(), copy.deepcopy(p.grad)) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    moments = copy.deepcopy(optimizer.state_dict())
    return [params, buffers, moments, batch.grad, batch.clone(), torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def leave_everything_as_it_was() -> None:
    model = make(Lively)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(2):
        square(model(batch)).backward()
        optimizer.step()
    before, classes = state_of(model, optimizer, batch), [type(m) for m in model.modules()]
    batch_gradient = None if batch.grad is None else batch.grad.clone()
    result = fsdp_ext.verify(model, batch, units=Block, verbose=False)
    assert result.ok, str(result)
    after = state_of(model, optimizer, batch)
    assert all(a[0] is b[0] for a, b in zip(before[0], after[0], strict=True))
    assert same(before, after)
    assert same(batch_gradient, batch.grad)
    assert [type(m) for m in model.modules()] == classes
    unsteady = make(Unsteady)
    state = torch.get_rng_state()
    assert not fsdp_ext.verify(unsteady, batch, units=Block, verbose=False).ok
    assert torch.equal(state, torch.get_rng_state())


def test_model_optimizer_batch_and_random_state_are_as_before_in_one_process() -> None:
    run_ranks(alone, 1, leave_everything_as_it_was, fresh=True)


def test_model_optimizer_batch_and_random_state_are_as_before_in_a_group() -> None:
    run_ranks(leave_everything_as_it_was, 2)


# - Arguments


def refuse_models_and_arguments() -> None:
    batch = torch.randn(4, WIDTH)
    sharded = fsdp_ext.fully_shard(make(Block))
    with pytest.raises(ValueError, match=r"got a \w*Model that is sharded already.*before fully"):
        fsdp_ext.verify(sharded, batch)
    with torch.device("meta"):
        on_meta = Model(Block)
    with pytest.raises(ValueError, match=r"'layers\.0\.first\.weight' is on the meta device"):
        fsdp_ext.verify(on_meta, batch)
    with pytest.raises(TypeError, match=r"got a Tensor\. Pass an nn.Module"):
        fsdp_ext.verify(cast(Any, batch), batch)
    with pytest.raises(ValueError, match=r"of shape \(4, 2\).*Return a scalar"):
        verify(loss=lambda output: output)
    with pytest.raises(ValueError, match="the class Conv2d in units"):
        verify(units=nn.Conv2d)
    with pytest.raises(TypeError, match="verify got a Simulated transport"):
        verify(transport=fsdp_ext.Simulated(2, fsdp_ext.Link("x", 0.0, 1e9)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fsdp_ext.verify(make(Block), torch.randn(4, WIDTH + 1), units=Block)
    for bad, words in (
        (lambda y: y.sum() / 0, "in the loss"),
        (lambda y: (y * 0).sum().sqrt(), "in the gradient of 'layers"),
    ):
        with pytest.raises(ValueError, match=f"with NaN or Inf {words}"):
            verify(loss=bad)
    uncopied = make(Block)
    uncopied.history = uncopied.head.weight * 2
    with pytest.raises(ValueError, match=r"copy\.deepcopy of it raised RuntimeError"):
        fsdp_ext.verify(uncopied, batch)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"different values of 'layers\.0\.first\.weight'.*seed"):
        fsdp_ext.verify(Model(Block), batch)


def test_what_cannot_be_verified_is_refused_in_a_sentence() -> None:
    run_ranks(refuse_models_and_arguments, 2)
