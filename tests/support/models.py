"""Models that the tests train. Each makes its own batches and loss and names its own units.

They are small, and 10 and 14 rows make chunks of unequal size on 3 and 4 ranks. No gradient is a
sum of more than two terms, some from inside a unit and some from outside: FSDP2 puts autograd nodes
around units, which add those up in another order than the unsharded model does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 10
HIDDEN = 14
ROWS = 6

Unit = nn.Module | list[nn.Module]
Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Subject(nn.Module):
    """A model under test. Subclasses define only their special parts."""

    def units(self) -> list[Unit]:
        """Return the modules to shard below the root, innermost first."""
        return []

    def batch(self, generator: torch.Generator) -> Batch:
        """Return the arguments and keyword arguments of one forward."""
        return (torch.randn(ROWS, DIM, generator=generator),), {}

    def loss(self, output: Any) -> Tensor:
        """Return a scalar that depends on every element of the output."""
        return (output.float() - 1).square().mean()


class Mlp(nn.Module):
    """x + down(gelu(up(norm(x)))), the residual block that most subjects are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Versioned(nn.Linear):
    """Files of its version 1 have half of its weights."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Stack(Subject):
    """Three blocks, each a unit, between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(DIM, DIM)

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OneUnit(Stack):
    """All parameters are the root's."""

    def units(self) -> list[Unit]:
        return []


class BareRoot(Subject):
    """Every parameter belongs to a unit below the root. The root has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Mlp(), Mlp())

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class TwoLayers(nn.Module):
    """Two layers to be units of their own, and a head for the root unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return cast(Tensor, self.head(x))


class GroupedModules(Stack):
    """Lists of modules as units: two neighbours, and two that run first and last."""

    def units(self) -> list[Unit]:
        first, second, _ = self.blocks
        return [[first, second], [self.stem, self.head]]


class NestedUnits(Stack):
    """Units in units in the root, each with parameters of its own."""

    def units(self) -> list[Unit]:
        nested: list[Unit] = []
        for block in self.blocks:
            nested += [block.up, block]
        return nested


class BranchingUnits(Stack):
    """Which blocks run, and in which order, changes from one forward to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        orders = [(0, 1, 2), (2, 0), (1,), (2, 1, 0)]
        x = self.stem(x)
        for index in orders[self.forwards % len(orders)]:
            x = self.blocks[index](x)
        self.forwards += 1
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention without bias. A bias of the keys does not change softmax, so its
    gradient would be rounding noise, which adaptive optimizers amplify."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads=2)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(Subject):
    """Token and position embeddings, two blocks, and a head tied to the token embedding."""

    VOCABULARY = 22
    LENGTH = 5

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, DIM)
        self.positions = nn.Parameter(torch.randn(self.LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(TransformerBlock(DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, self.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def batch(self, generator: torch.Generator) -> Batch:
        shape = (3, self.LENGTH)
        return (torch.randint(self.VOCABULARY, shape, generator=generator),), {}

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), tokens

    def loss(self, output: tuple[Tensor, Tensor]) -> Tensor:
        logits, tokens = output
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class FrozenBesideTrainable(Stack):
    """Units whose first layers are frozen. Backward reads them after the unit's trainable
    gradients are complete, for the gradient of the unit before."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up.requires_grad_(False)


class FrozenUnit(Stack):
    """A frozen unit between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenStart(Stack):
    """The first layers are frozen, so no gradient reaches the first units at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class UnusedParameters(Stack):
    """A unit with a layer that never runs, and a unit that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].spare = nn.Linear(DIM, DIM)
        self.spare = Mlp()

    def units(self) -> list[Unit]:
        return [*self.blocks, self.spare]


class TiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedInUnit(Stack):
    """A unit with two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = TiedBlock()


class UnitCalledTwice(Stack):
    """A unit that runs twice in a row, and one that runs before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = second(first(self.stem(x)))
        return self.head(first(third(third(x))))


class FewRows(Stack):
    """Parameters with fewer rows than there are ranks, and rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(DIM, 1), nn.Linear(1, 2), nn.Linear(2, DIM))
        self.head = nn.Linear(DIM, 7)


class EmptyParameter(Stack):
    """A unit with two empty parameters, of which one takes part in forward."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(WithEmpty(), Mlp())
        block.unused = nn.Parameter(torch.empty(0, 3))
        self.blocks[1] = block


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


class ManyShapes(Stack):
    """Parameters of one, three and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = ConvBlock()


class ConvBlock(nn.Module):
    """A convolution over the features as a line, with a scale for each of 3 x 2 x DIM places."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 3, kernel_size=(1, 3), padding=(0, 1))
        self.scale = nn.Parameter(torch.randn(3, 1, DIM))
        self.mix = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.lift(x.view(-1, 1, 1, DIM)) * self.scale
        return x + lifted.sum(dim=(1, 2)) * self.mix


class Recomputed(Stack):
    """Activation checkpointing in the blocks, around them, or both."""

    def __init__(self, *, inside: bool, around: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.around = around
        self.use_reentrant = use_reentrant
        if inside:
            self.blocks = nn.ModuleList(RecomputedMlp(use_reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.around:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.head(x)


class RecomputedMlp(Mlp):
    """A block that recomputes its norm with its first layer, and its second layer by itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._first_half, x, use_reentrant=self.use_reentrant)
        return x + checkpoint(self.down, hidden, use_reentrant=self.use_reentrant)

    def _first_half(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(x)))


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor
    label: str = "a pair"


class Fork(nn.Module):
    """A unit with two outputs, in whatever container `pack` makes of them."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.first(x), self.second(x))


class Containers(Subject):
    """Units and a root with containers as outputs. `take` picks the tensors that are used."""

    def __init__(
        self, pack: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, ...]]
    ) -> None:
        super().__init__()
        self.pack = pack
        self.take = take
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Fork(pack) for _ in range(3))

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(sum(self.take(block(x))))
        return self.pack(x * 2, x.exp())

    def loss(self, output: Any) -> Tensor:
        losses = [(tensor.float() - 1).square().mean() for tensor in self.take(output)]
        return torch.stack(losses).sum()


class KeywordBlock(Mlp):
    def forward(self, x: Tensor, *, scale: Tensor, skip: Tensor | None = None) -> Tensor:
        out = super().forward(x) * scale
        return out if skip is None else out + skip


class Keywords(Subject):
    """The root and its units take tensors, None and plain values by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(2))

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def batch(self, generator: torch.Generator) -> Batch:
        x = torch.randn(ROWS, DIM, generator=generator)
        return (), {"x": x, "settings": {"skip": True, "shift": x.flip(0)}}

    def forward(self, x: Tensor, settings: dict[str, Any]) -> Tensor:
        scale = torch.sigmoid(self.scale(settings["shift"]))
        first, second = self.blocks
        y = first(x=x, scale=scale, skip=None)
        return second(y, skip=x if settings["skip"] else None, scale=scale)


class TrainableInput(Stack):
    """The batch itself requires a gradient, as in a model that is part of a larger one."""

    def batch(self, generator: torch.Generator) -> Batch:
        (x,), _ = super().batch(generator)
        return (x.requires_grad_(),), {}


class InBfloat16(Stack):
    """Takes batches in bfloat16. Its parameters keep their dtype."""

    def batch(self, generator: torch.Generator) -> Batch:
        (x,), _ = super().batch(generator)
        return (x.bfloat16(),), {}


class InFloat64(Stack):
    """Takes batches in float64. Its parameters keep their dtype."""

    def batch(self, generator: torch.Generator) -> Batch:
        (x,), _ = super().batch(generator)
        return (x.double(),), {}


class DeliberateFailure(Exception):
    """The exception of subjects that fail."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise DeliberateFailure("raised in backward")


class Fragile(Stack):
    """Raises between its last two blocks while `failure` says where: "forward", "backward" (by an
    autograd function) or "hook" (by a tensor's hook)."""

    failure: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        if self.failure == "forward":
            raise DeliberateFailure("raised in forward")
        if self.failure == "backward":
            x = _RaiseInBackward.apply(x)
        if self.failure == "hook":
            x.register_hook(_raise_in_hook)
        return self.head(self.blocks[2](x))


class FragileBlock(Mlp):
    """A unit that fails in the middle of its own forward."""

    failing = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.failing:
            raise DeliberateFailure("raised in a unit's forward")
        return x + self.down(F.gelu(hidden))


class FragileUnit(Stack):
    """Raises in the forward of the unit in the middle while `failure` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = FragileBlock()

    @property
    def failure(self) -> str | None:
        return "forward" if self.blocks[1].failing else None

    @failure.setter
    def failure(self, where: str | None) -> None:
        self.blocks[1].failing = where is not None


def _raise_in_hook(grad: Tensor) -> Tensor:
    raise DeliberateFailure("raised in a hook")
