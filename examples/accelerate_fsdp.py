"""Train with accelerate, whose FSDP plugin shards with fsdp_ext after ``fsdp_ext.patch()``.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/accelerate_fsdp.py

Apart from the patch this is a program for accelerate: prepare, accumulate, clip, save and load the
state. It needs `pip install accelerate transformers`, and downloads nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import fsdp_ext

fsdp_ext.patch()  # before the imports of libraries, some of which take PyTorch's names

import torch  # noqa: E402
from accelerate import (  # noqa: E402
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from corpus import VOCABULARY, load_corpus, training_batch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank at once")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--precision", choices=["no", "bf16"], default="bf16")
    parser.add_argument("--save", type=Path, help="where to write the state of training")
    return parser.parse_args()


def make_loader(options: argparse.Namespace, ranks: int) -> DataLoader[Any]:
    """Return the batches of all ranks. accelerate gives each rank its own ones."""
    corpus = load_corpus(None, options.context)
    count = options.steps * options.accumulate * options.batch * ranks
    sequences = training_batch(corpus, 0, 0, count, options.context - 1)
    return DataLoader(TensorDataset(sequences), options.batch)


def shard_on_cpus() -> None:
    """Tell accelerate that CPUs are GPUs, because it would use DDP on CPUs."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")


def main() -> None:
    """Train, save the state, and load it again."""
    options = parse_arguments()
    if not torch.cuda.is_available():
        shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.accumulate,
        fsdp_plugin=plugin,
    )
    torch.manual_seed(0)  # every rank makes the same parameters
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, make_loader(options, accelerator.num_processes)
    )
    if not isinstance(model, fsdp_ext.FSDPModule):
        raise SystemExit(
            f"accelerate made a {type(model).__name__} that fsdp_ext has not sharded. Call "
            "fsdp_ext.patch() before accelerate is imported."
        )

    for number, (ids,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        step, position = divmod(number, options.accumulate)
        if position == options.accumulate - 1 and (step % 10 == 0 or step == options.steps - 1):
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step}: loss {mean:.4f}")

    with tempfile.TemporaryDirectory() as temporary:
        # Ranks of several hosts need a folder that all of them see: --save.
        folder = str(options.save or temporary)
        folder = accelerator.gather_for_metrics([folder], use_gather_object=True)[0]
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    accelerator.print(fsdp_ext.describe_buckets(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
