"""The steps that benchmarks/gpu.py measures, on random tokens."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from benchmarks.harness import Case
from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import prepare_deepspeed
from multicls.environment import flops_per_token, peak_flops
from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
from pretrain.batches import MicroBatch
from pretrain.engine import build_engine, prepare_layers
from pretrain.settings import PretrainSettings, batch_arithmetic
from pretrain.training import train_step

FACETS, VOCABULARY = 5, 30_528
CUDA = torch.cuda.is_available()
PRECISION: Any = "bf16" if CUDA else "fp32"


def measure(
    shape: tuple[str, int, int], length: int, sequences: int, *, fill: float, **train: Any
) -> dict[str, Any]:
    """Returns a row on steps of a shape (kind, hidden size, layers); too large a batch is a row, too."""
    encoder = encoder_of(shape, length)
    row: dict[str, Any] = {"length": length, "sequences": sequences, "fill": fill}
    plain = plain_seconds(shape, length, sequences, fill)
    row["plain MLM, ms"] = "out of memory" if plain is None else 1000 * plain
    model = MultiClsForPreTraining(MultiClsConfig(encoder=encoder, num_facets=FACETS))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = random_batch(sequences, length, fill, bool(train.get("unpad")))
    ours = seconds(lambda: engine_step(model, batch, sequences // 3, train))
    if ours is None:
        return row | {"ours, ms": "out of memory"}
    tokens = batch.counts["tokens"] / ours
    row |= {"ours, ms": 1000 * ours, "tokens/s": tokens}
    if CUDA:
        work = flops_per_token(parameters, shape[2], shape[1], length)
        if peak := peak_flops(torch.cuda.get_device_name()):
            row["MFU"] = tokens * work / peak
        row["GB reserved"] = torch.cuda.max_memory_reserved() / 1e9
    return row


def encoder_of(shape: tuple[str, int, int], length: int) -> Any:
    """Returns the configuration of an encoder."""
    kind, hidden, layers = shape
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": hidden // 64, "max_position_embeddings": max(length, 512)}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1}  # ModernBERT's exceed it
    sizes |= {"eos_token_id": 2, "sep_token_id": 2}
    return AutoConfig.for_model(kind, **sizes)


@lru_cache(maxsize=2)
def plain_seconds(
    shape: tuple[str, int, int], length: int, sequences: int, fill: float
) -> float | None:
    """Returns the seconds of a step of masked LM in a plain loop, measured once for all switches of ours."""
    batch = random_batch(sequences, length, fill, unpad=False)
    return seconds(lambda: plain_step(encoder_of(shape, length), batch))


def seconds(make: Callable[[], AbstractContextManager[Case]], rounds: int = 8) -> float | None:
    """Returns the median seconds of the step that `make` gives, after three that warm up; None if memory is short."""
    gc.collect()  # engines and models refer to themselves
    torch._dynamo.reset()  # or the compiler gives up at its ninth shape
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    try:
        with make() as step:
            for number in range(rounds + 3):
                begun = time.perf_counter()
                step()
                if CUDA:
                    torch.cuda.synchronize()
                if number >= 3:
                    times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError:
        return None
    return statistics.median(times)


@contextmanager
def engine_step(
    model: MultiClsForPreTraining, batch: MicroBatch, examples: int, train: dict[str, Any]
) -> Iterator[Case]:
    """Gives a step of pretraining with ZeRO 1."""
    values: dict[str, Any] = {"model": {"checkpoint": "random"}, "data": {"corpus": "random"}}
    values["train"] = {"steps": 1_000_000, "negatives_group": 2 if examples < 10 else 10}
    values["train"] |= {"global_batch_size": examples, "micro_batch_size": examples}
    values["train"] |= {"precision": PRECISION, "compile": False} | train
    settings = PretrainSettings.model_validate(values)
    prepare_layers(model, settings.train, PRECISION)
    file = load_deepspeed_config("ds_configs/zero1.json")
    arithmetic = batch_arithmetic(settings.train, 1)
    config = complete_deepspeed_config(file, precision=PRECISION, **arithmetic)
    weights = settings.objective.in_use
    engine = build_engine(prepare_deepspeed(), model, config, settings.train, weights)
    numbers = itertools.count()
    try:
        yield lambda: train_step(engine, settings, [batch], next(numbers))
    finally:
        engine.destroy()  # its hooks would keep the model for ever


@contextmanager
def plain_step(encoder: Any, batch: MicroBatch) -> Iterator[Case]:
    """Gives a step of the encoder's masked-LM model in a plain loop; in 16 bits all its state is 16-bit."""
    device = torch.device("cuda" if CUDA else "cpu")
    model: Any = AutoModelForMaskedLM.from_config(encoder).to(device).train()
    if CUDA:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    inputs = batch.to(device).inputs
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}

    def step() -> None:
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step


def random_batch(sequences: int, length: int, fill: float, unpad: bool) -> MicroBatch:
    """Returns a micro-batch of random tokens, of which 15 % are to predict."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20_000, (sequences, length), generator=random)
    real = torch.arange(length).expand(sequences, length) < int(fill * length)
    is_masked = (torch.rand(ids.shape, generator=random) < 0.15) & real
    is_masked[:, : FACETS + 1] = False
    masked, tokens = is_masked.flatten().nonzero()[:, 0], int(real.sum())
    inputs = {
        "input_ids": ids * real,
        "attention_mask": real.long(),
        "labels": torch.where(is_masked, ids, -100),
        "tfidf_labels": torch.rand(sequences, length - FACETS, generator=random),
        "so_labels": torch.randint(0, 2, (sequences,), generator=random),
        "masked_positions": masked,
    }
    if unpad:
        inputs["real_positions"] = real.flatten().nonzero()[:, 0]
        starts = torch.nn.functional.pad(real.sum(dim=1).cumsum(0), (1, 0))
        inputs["sequence_starts"] = starts
    counts = {"mlm": len(masked), "tfidf": tokens - FACETS * sequences, "so": sequences}
    counts |= {"examples": sequences // 3, "sequences": sequences, "tokens": tokens}
    return MicroBatch(0, np.zeros((sequences // 3, 3), np.int64), inputs, counts)
