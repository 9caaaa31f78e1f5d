"""Units may have containers as inputs and outputs, and outputs that nobody uses."""

from __future__ import annotations

import collections
import dataclasses
from functools import partial
from typing import Any, NamedTuple

from support import models
from support.models import Containers, Pair
from support.parity import DATACLASSES, Case, check, each, gentle_sgd
from torch import Tensor


class Named(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    first: Tensor
    second: Tensor


def as_tuple(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def as_list(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a, b]


def as_dict(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"first": a, "second": b}


def as_ordered_dict(a: Tensor, b: Tensor) -> collections.OrderedDict[str, Tensor]:
    return collections.OrderedDict(second=b, first=a)


def as_dataclass_in_a_dict(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"pair": Pair(a, b), "label": "nested", "none": None}


def as_nested(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"outer": [a, (None, {"inner": b})], "label": "nested", "count": 2}


def detached_second(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b.detach()


def as_view(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a[:, :], b.t()


def with_same_tensor_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a, b, a


def both_items(output: Any) -> tuple[Tensor, ...]:
    return output[0], output[1]


def three_items(output: Any) -> tuple[Tensor, ...]:
    return tuple(output)


def both_values(output: Any) -> tuple[Tensor, ...]:
    return output["first"], output["second"]


def both_fields(output: Any) -> tuple[Tensor, ...]:
    assert isinstance(output, Pair | FrozenPair | Named)
    return output.first, output.second


def fields_in_the_dict(output: Any) -> tuple[Tensor, ...]:
    assert output["label"] == "nested"
    return both_fields(output["pair"])


def both_nested(output: Any) -> tuple[Tensor, ...]:
    assert output["count"] == 2
    return output["outer"][0], output["outer"][1][1]["inner"]


def item_and_transposed(output: Any) -> tuple[Tensor, ...]:
    return output[0], output[1].t()


def first_item(output: Any) -> tuple[Tensor, ...]:
    return (output[0],)


def second_field(output: Any) -> tuple[Tensor, ...]:
    return (output.second,)


CASES = [
    Case("a tuple", partial(Containers, as_tuple, both_items)),
    Case("a list", partial(Containers, as_list, both_items)),
    Case("a dataclass", partial(Containers, Pair, both_fields),
         fsdp2_fails=DATACLASSES),
    Case("a frozen dataclass", partial(Containers, FrozenPair, both_fields),
         fsdp2_fails=DATACLASSES),
    Case("nested containers with None and numbers", partial(Containers, as_nested, both_nested)),
    Case("a dataclass in a dict", partial(Containers, as_dataclass_in_a_dict, fields_in_the_dict),
         fsdp2_fails=DATACLASSES),
    Case("views", partial(Containers, as_view, item_and_transposed)),
    Case("a named tuple", partial(Containers, Named, both_fields)),
    Case("a tuple whose second tensor nobody uses", partial(Containers, as_tuple, first_item)),
    Case("a dict", partial(Containers, as_dict, both_values)),
    Case("the same tensor twice", partial(Containers, with_same_tensor_twice, three_items),
         optimizer=gentle_sgd),
    Case("a dataclass whose first tensor nobody uses", partial(Containers, Pair, second_field),
         fsdp2_fails=DATACLASSES),
    Case("a tuple with a detached tensor", partial(Containers, detached_second, both_items)),
    Case("an ordered dict", partial(Containers, as_ordered_dict, both_values)),
    Case("keyword arguments, some of them None", models.Keywords),
]  # fmt: skip


@each(CASES, every=3)
def test_outputs_and_inputs_pass_units_as_unsharded_and_as_under_fsdp2(
    case: Case, world_size: int
) -> None:
    check(case, world_size)
