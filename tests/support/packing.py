"""Random plans of the packer, and their results by PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_ext import _C

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(got: Tensor, expected: Tensor) -> None:
    """Raise unless two tensors agree bit for bit. All NaNs are equal."""
    integers = _INTEGERS[got.element_size()]
    differ = (got.view(integers) != expected.view(integers)) & ~(got.isnan() & expected.isnan())
    if differ.any():
        first = int(differ.nonzero()[0])
        raise AssertionError(
            f"{int(differ.sum())} of {got.numel()} elements differ; element {first} is "
            f"{got[first].item()} where torch has {expected[first].item()}"
        )


def random_values(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return values of all magnitudes that fp16 has, some of them subnormal there, some special."""
    exponents = torch.randint(-26, 15, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponents
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0])
    chosen = torch.randint(0, 200, (numel,), generator=generator)
    values = torch.where(chosen < 6, special.double()[chosen.clamp(max=5)], values)
    return values.to(dtype)


def scaled(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Do the packer's arithmetic (csrc/pack/pack.h) in PyTorch's operators."""
    wide = torch.float64 if torch.float64 in (values.dtype, dtype) else torch.float32
    product = values.to(wide) * torch.tensor(scale, dtype=wide, device=values.device)
    if dtype in (torch.bfloat16, torch.float16):
        product = product.float()
    return product.to(dtype)


def added(before: Tensor, rounded: Tensor) -> Tensor:
    """Return the sum that `before += rounded` gives."""
    return before + rounded


class RandomPack:
    """Gradients of a unit: Shard(0) and Shard(dim > 0), gaps, absent ones, any alignment."""

    def __init__(
        self,
        seed: int,
        world_size: int,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
        absent: bool = True,
        largest_row: int = 300,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        self.world_size = world_size
        self.reduce_dtype = reduce_dtype
        self.device = device
        self.generator = generator
        self.entries: list[tuple[int, int, int, int]] = []
        self.gradients: list[Tensor | None] = []
        offset = pick(0, 1) * pick(0, 5)
        for _ in range(pick(0, 5)):
            rows, row = pick(0, 2 * world_size + 3), pick(0, largest_row if pick(0, 3) == 0 else 9)
            runs = 1
            chunk = -(-rows // world_size) * row
            numel = rows * row
            if pick(0, 3) == 0:
                runs = pick(1, 4)
                chunk = row * runs
                numel = chunk * world_size
            self.entries.append((numel, chunk, offset, runs))
            offset += chunk + pick(0, 1) * pick(0, 7)
            before = pick(0, 1) * pick(0, 15)
            values = random_values(before + numel, dtype, generator).to(device)
            self.gradients.append(None if absent and pick(0, 4) == 0 else values[before:])
        self.segment_numel = offset

    def reduce_input(self, poisoned: bool) -> Tensor:
        """Return memory to pack into: NaN, or values to add to."""
        numel = self.world_size * self.segment_numel
        if poisoned:
            return torch.full((numel,), float("nan"), dtype=self.reduce_dtype, device=self.device)
        return random_values(numel, self.reduce_dtype, self.generator).to(self.device)

    def places(self, entry: tuple[int, int, int, int]) -> Tensor:
        """Return where each element of a gradient goes."""
        numel, chunk, offset, runs = entry
        index = torch.arange(numel, device=self.device)
        run = max(chunk // runs, 1)
        rank = index // run % self.world_size
        piece = index // run // self.world_size
        return rank * self.segment_numel + offset + piece * run + index % run

    def pack_with_torch(self, destination: Tensor, scale: float, accumulate: bool) -> None:
        """Write what is expected."""
        if not accumulate:
            destination.zero_()
        for entry, gradient in zip(self.entries, self.gradients, strict=True):
            if gradient is None:
                continue
            places = self.places(entry)
            values = scaled(gradient, destination.dtype, scale)
            destination[places] = added(destination[places], values) if accumulate else values

    def unpack_plan(self, packer: _C.Packer) -> tuple[_C.UnpackPlan, Tensor]:
        """Return the plan that unpacks, and memory for it."""
        size = self.reduce_dtype.itemsize
        entries, end = [], 0
        for _, chunk, offset, runs in self.entries:
            entries.append((chunk * size, offset * size, end * size, runs))
            end += chunk * self.world_size + 5  # also regions that begin at odd places
        plan = packer.unpack_plan(entries, self.segment_numel * size, self.world_size)
        return plan, torch.full((end,), float("nan"), dtype=self.reduce_dtype, device=self.device)

    def regions(self, unsharded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each gradient with its part of the unpacked memory."""
        start = 0
        for (numel, chunk, _, _), gradient in zip(self.entries, self.gradients, strict=True):
            assert gradient is not None
            yield gradient, unsharded[start : start + numel]
            start += chunk * self.world_size + 5


class RandomCast:
    """Runs of elements with gaps between them, in any place."""

    def __init__(
        self, seed: int, source: torch.dtype, destination: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        self.entries: list[tuple[int, int, int, torch.dtype, torch.dtype]] = []
        self.runs: list[tuple[int, int, int]] = []
        ends = [pick(0, 3), pick(0, 3)]
        for _ in range(pick(0, 5)):
            numel = pick(0, 9000) if pick(0, 4) == 0 else pick(0, 90)
            self.runs.append((ends[0], ends[1], numel))
            self.entries.append(
                (
                    ends[0] * source.itemsize,
                    ends[1] * destination.itemsize,
                    numel,
                    source,
                    destination,
                )
            )
            ends = [end + numel + pick(0, 9) for end in ends]
        self.source = random_values(ends[0], source, generator).to(device)
        self.destination = random_values(ends[1], destination, generator).to(device)

    def cast_with_torch(self, destination: Tensor, scale: float, accumulate: bool) -> None:
        """Write what is expected."""
        for start, to, numel in self.runs:
            values = scaled(self.source[start : start + numel], destination.dtype, scale)
            part = destination[to : to + numel]
            part.copy_(added(part, values) if accumulate else values)
