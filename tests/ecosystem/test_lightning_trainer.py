"""Lightning's Trainer trains with fsdp_ext as with PyTorch's FSDP, once it is patched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ecosystem.families import LENGTH, VOCABULARY, subject
from ecosystem.lightnings import Fsdp1OnCpusMixin, on_these_ranks
from ecosystem.systems import fsdp_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from support.launcher import run_ranks
from support.parity import assert_same, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.utils.data import DataLoader

import fsdp_ext

EPOCHS = 2


class Learner(LightningModule):
    """A Llama that keeps its losses and the norms of its parameters."""

    def __init__(self, *, by_fully_shard: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = subject("llama")
        self.by_fully_shard = by_fully_shard
        self.found: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.by_fully_shard:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for unit in self.llama.units():
                fully_shard(unit, mesh=mesh)
            fully_shard(self.llama, mesh=mesh)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.llama(input_ids=batch, labels=batch).loss
        self.found[f"loss {self.current_epoch}.{number}"] = loss.detach()
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        tokens = torch.randint(
            3, VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        return DataLoader(list(tokens), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Fsdp1OnCpus(Fsdp1OnCpusMixin, FSDPStrategy):
    """The Trainer's strategy for FSDP1."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        with self.wrapping():
            return super()._setup_model(model)


def trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        **on_these_ranks(),
        accumulate_grad_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def by_fsdp1(options: dict[str, Any]) -> Any:
    block = type(subject("llama").units()[0])
    return Fsdp1OnCpus(auto_wrap_policy={block}, **options)


def by_fsdp2(options: dict[str, Any]) -> Any:
    return ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, **options
    )


def fit(
    strategy: Any, epochs: int, checkpoint: Path | None = None, **options: Any
) -> tuple[Trainer, dict[str, Tensor]]:
    """Train, go on from the checkpoint if it exists, and return losses and whole parameters."""
    is_fsdp1 = isinstance(strategy, FSDPStrategy)
    learner = Learner(by_fully_shard=not is_fsdp1)
    fitted = trainer(strategy, max_epochs=epochs, **options)
    fitted.fit(learner, ckpt_path=checkpoint, weights_only=False)
    return fitted, learner.found | dict(_parameters(fitted.model))


def _parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, TorchFSDP):
        with TorchFSDP.summon_full_params(model):
            for name, param in model.named_parameters():
                yield name.replace("_fsdp_wrapped_module.", ""), param.detach().clone()
        return
    for name, param in model.named_parameters():
        yield name.replace("_fsdp_wrapped_module.", ""), whole(param)


def compare(make: Any, options: dict[str, Any], settings: dict[str, Any], folder: str) -> None:
    found = {}
    checkpoint = Path(folder) / "checkpoint"
    for system in ("torch", "fsdp_ext"):
        with fsdp_of(system):
            fitted, found[system] = fit(make(options), EPOCHS, **settings)
            kinds = fsdp_ext.FSDPModule, fsdp_ext.FullyShardedDataParallel
            is_ours = any(isinstance(module, kinds) for module in fitted.model.modules())
            assert is_ours == (system == "fsdp_ext")
    assert_same("PyTorch's", found["torch"], found["fsdp_ext"])
    with fsdp_of("fsdp_ext"):
        first, begun = fit(make(options), 1, **settings)
        first.save_checkpoint(checkpoint)
        dist.barrier()
        assert checkpoint.is_dir() == (True in options.values() or "sharded" in options.values())
        _, resumed = fit(make(options), EPOCHS, checkpoint, **settings)
        of_epoch_0 = {name for name in begun if name.startswith("loss")}
        ours = {key: value for key, value in found["fsdp_ext"].items() if key not in of_epoch_0}
        assert_same("resumed", ours, resumed)


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
BY_NORM = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
CASES = [
    pytest.param(by_fsdp1, {"state_dict_type": "full"}, BY_VALUE, id="FSDP1"),
    pytest.param(
        by_fsdp1, {"state_dict_type": "sharded"}, {"precision": "bf16-mixed"}, id="FSDP1 in bf16"
    ),
    pytest.param(by_fsdp2, {"save_distributed_checkpoint": False}, BY_NORM, id="FSDP2, full"),
    pytest.param(by_fsdp2, {"save_distributed_checkpoint": True}, BY_NORM, id="FSDP2, sharded"),
]


@pytest.mark.parametrize(("make", "options", "settings"), CASES)
def test_the_trainer_clips_saves_and_resumes_as_with_torchs_fsdp(
    make: Any, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(compare, 2, make, options, settings, str(tmp_path))
