"""The steps that benchmarks/gpu.py measures, on random tokens; each row in a process of its own.

python -m benchmarks.gpu_steps '{"model": "BERT-base", "length": 128, "sequences": 30, "what": "graph"}'

Nothing that one row changes, such as attention masks that our steps register, reaches another one.
"""

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from benchmarks.harness import Case
from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import prepare_deepspeed
from multicls.environment import flops_per_token, peak_flops
from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
from pretrain.batches import MicroBatch, pack
from pretrain.engine import Engine, prepare_layers
from pretrain.settings import PretrainSettings
from pretrain.trainer import train_step

FACETS, VOCABULARY, GROUP = 5, 30_528, 10
FILL = 0.85  # share of real tokens; a part of Wikipedia or a book has 105 of 128
SHAPES = {  # kind, hidden size, layers
    "BERT-base": ("bert", 768, 12),
    "ModernBERT-base": ("modernbert", 768, 22),
    "MiniLM": ("bert", 384, 6),
    "tiny BERT": ("bert", 64, 2),
    "tiny ModernBERT": ("modernbert", 64, 2),
}
SWITCHES: dict[str, dict[str, Any]] = {  # settings of `train`
    "default": {},
    "eager": {"graph": False, "unpad": False},
    "graph": {"graph": True, "unpad": False},
    "graph, unpad": {"graph": True, "unpad": True, "compile": False},
}
CUDA = torch.cuda.is_available()
PRECISION: Any = "bf16" if CUDA else "fp32"


def measure(model: str, length: int, sequences: int, what: str) -> dict[str, Any]:
    """Returns a row on steps of a shape: "plain", or one of `SWITCHES`; too large a batch is a row, too."""
    shape = SHAPES[model]
    encoder = encoder_of(shape, length)
    row: dict[str, Any] = {"model": model, "length": length, "sequences": sequences, "what": what}
    unpad = bool(SWITCHES.get(what, {}).get("unpad"))
    batch = random_batch(sequences, length, FILL, unpad and CUDA)
    if what == "plain":
        took = seconds(lambda: plain_step(encoder, batch))
        return row | {"ms": "out of memory" if took is None else 1000 * took}
    config = MultiClsConfig(encoder=encoder, num_facets=FACETS)
    notes = list[str]()
    took = seconds(lambda: engine_step(config, batch, SWITCHES[what], notes))
    if took is None:
        return row | {"ms": "out of memory"}
    tokens = batch.counts["tokens"] / took
    row |= {"ms": 1000 * took, "tokens/s": tokens}
    if CUDA:
        objectives = ("mlm", "tfidf", "so", "mcqt")
        sizes: Any = {"length": length, "group_size": GROUP, "mlm_probability": 0.15}
        work = flops_per_token(config, objectives, **sizes)
        if peak := peak_flops(torch.cuda.get_device_name()):
            row["MFU"] = tokens * work / peak
        row["GB reserved"] = torch.cuda.max_memory_reserved() / 1e9
    return row | {"notes": "; ".join(notes)}


def encoder_of(shape: tuple[str, int, int], length: int) -> Any:
    """Returns the configuration of an encoder."""
    kind, hidden, layers = shape
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": hidden // 64, "max_position_embeddings": max(length, 512)}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1}  # ModernBERT's exceed it
    sizes |= {"eos_token_id": 2, "sep_token_id": 2}
    return AutoConfig.for_model(kind, **sizes)


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
    config: MultiClsConfig, batch: MicroBatch, switches: dict[str, Any], notes: list[str]
) -> Iterator[Case]:
    """Gives a step of pretraining with ZeRO 2; `notes` gets lines of the log."""
    model, examples = MultiClsForPreTraining(config), batch.counts["examples"]
    values: dict[str, Any] = {"model": {"checkpoint": "random"}, "data": {"corpus": "random"}}
    values["train"] = {"steps": 1_000_000, "negatives_group": 2 if examples < GROUP else GROUP}
    values["train"] |= {"global_batch_size": examples, "micro_batch_size": examples}
    values["train"] |= {"precision": PRECISION} | switches
    settings = PretrainSettings.model_validate(values)
    train, lines = prepare_layers(model, settings.train, PRECISION)
    settings = settings.model_copy(update={"train": train})
    complete = complete_deepspeed_config(
        load_deepspeed_config("ds_configs/zero2.json"),
        micro_batch_size=examples,
        accumulation=1,
        world_size=1,
        max_grad_norm=train.max_grad_norm,
        precision=PRECISION,
    )
    engine = Engine(prepare_deepspeed(), model, complete, settings)
    numbers = itertools.count()
    yield lambda: train_step(engine, settings, [batch], next(numbers))
    notes += [*lines, *engine.new_notes()]


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
        packed = pack(real.long().numpy())
        inputs["real_positions"], inputs["sequence_starts"] = map(torch.from_numpy, packed)
    counts = {"mlm": len(masked), "tfidf": tokens - FACETS * sequences, "so": sequences}
    counts |= {"examples": sequences // 3, "sequences": sequences, "tokens": tokens}
    return MicroBatch(0, np.zeros((sequences // 3, 3), np.int64), inputs, counts)


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)
