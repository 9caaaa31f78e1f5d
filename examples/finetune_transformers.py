"""Train a model of transformers, sharded over any number of ranks, and save it for transformers.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/finetune_transformers.py
    ... --model FOLDER      # a model that save_pretrained has written, with its tokenizer

Each layer is a unit. Parameters are kept in fp32, and computation is in bf16. A step accumulates
several batches. Between steps the model writes text, and at the end rank 0 has a folder that
``from_pretrained`` loads. Without ``--model`` it is a small Llama with random weights, which reads
bytes. It needs `pip install transformers`, and downloads nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import VOCABULARY, load_corpus, training_batch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    get_cosine_schedule_with_warmup,
)

from fsdp_ext import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

PROMPT = "def __init__(self, "


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; without it, a small random Llama")
    parser.add_argument("--data", type=Path, help="text (default: the standard library's sources)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank at once")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--save", type=Path, help="where to write the model")
    return parser.parse_args()


def load(folder: Path | None) -> tuple[nn.Module, Callable[[str], list[int]], Callable[..., str]]:
    """Return a model, and what makes tokens of text and text of tokens."""
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model, tokenizer.encode, tokenizer.decode
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    return model, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")


def shard(model: nn.Module) -> None:
    """Make each layer a unit, and one of the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    register_fsdp_forward_method(model, "generate")  # it uses parameters before it calls forward


def batches(options: argparse.Namespace, encode: Any) -> Callable[[int], Tensor]:
    """Return a function that gives this rank's sequences of a batch, by the batch's number."""
    corpus = load_corpus(options.data, options.context)
    if options.model is not None:
        text = bytes(corpus.train[: 1 << 20].tolist()).decode(errors="replace")
        tokens = torch.tensor(encode(text))
        rows = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)

    def batch(number: int) -> Tensor:
        whole = options.batch * dist.get_world_size()
        if options.model is not None:
            chosen = torch.arange(whole) + number * whole
            ids = rows[chosen % len(rows)]
        else:
            ids = training_batch(corpus, 0, number, whole, options.context - 1)
        return ids[dist.get_rank() :: dist.get_world_size()]

    return batch


def main() -> None:
    """Train, write text, and save the model."""
    options = parse_arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # every rank makes the same parameters
    model, encode, decode = load(options.model)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    batch = batches(options, encode)
    prompt = torch.tensor([encode(PROMPT)], device=device)
    text = GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)

    for step in range(options.steps):
        for number in range(options.accumulate):
            model.set_requires_gradient_sync(number == options.accumulate - 1)
            ids = batch(step * options.accumulate + number).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / options.accumulate).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            dist.all_reduce(loss := loss.detach().clone())
            model.eval()
            written = model.generate(prompt, generation_config=text)[0].tolist()  # on all ranks
            model.train()
            if dist.get_rank() == 0:
                mean = loss.item() / dist.get_world_size()
                print(f"step {step}: loss {mean:.4f}, norm {norm.item():.3f}, {decode(written)!r}")

    if options.save is not None:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=whole)  # on all ranks; rank 0 gets it
        if dist.get_rank() == 0:
            model.save_pretrained(options.save, state_dict=state)
            print(f"saved to {options.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
