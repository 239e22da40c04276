"""The steps that benchmarks/step.py compares: ours, BertForMaskedLM's and DDP's, on the sample corpus."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from benchmarks.harness import Case, Report, take_turns
from multicls.corpus import Corpus
from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import leave_deepspeed, prepare_deepspeed
from multicls.files import read_json, write_json
from multicls.sample import SAMPLE_CORPUS, sample_model
from multicls.settings import load_settings
from pretrain.batches import MicroBatch, load_steps
from pretrain.engine import build_engine
from pretrain.export import build_model
from pretrain.job import build_streams
from pretrain.settings import PretrainSettings, batch_arithmetic, resolve_micro_batch
from pretrain.training import train_step, weighted_sum

GROUP = 10  # examples that are each other's negatives
BERT = "BertForMaskedLM, plain PyTorch"


@dataclass(frozen=True)
class Workload:
    """An encoder of random weights and its training on the sample corpus."""

    shape: tuple[int, int]
    examples: int = 10  # of a step and rank
    ranks: int = 1

    def encoder(self) -> dict[str, Any]:
        """Returns the fields of the encoder's configuration that make its size."""
        hidden, layers = self.shape
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
        return sizes | {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden}

    def settings(self, checkpoint: str = "sample") -> PretrainSettings:
        """Returns the settings of the run."""
        values: dict[str, Any] = {"model.checkpoint": checkpoint, "model.random_weights": True}
        values |= {"data.corpus": "sample", "data.num_workers": 0, "train.steps": 1_000_000}
        values |= {"train.precision": "fp32", "train.negatives_group": GROUP}
        values["train.global_batch_size"] = self.examples * self.ranks
        return resolve_micro_batch(load_settings(PretrainSettings, values=values), self.ranks)

    def model(self) -> tuple[Any, Any]:
        """Returns the model and its tokenizer."""
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            weights = shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx")
            shutil.copytree(sample_model(), folder, ignore=weights, dirs_exist_ok=True)
            config = Path(folder) / "config.json"
            write_json(config, read_json(config) | self.encoder())
            return build_model(self.settings(folder).model, lambda line: None)

    def batches(self, count: int, rank: int = 0) -> list[MicroBatch]:
        """Returns the first micro-batches of a rank."""
        model, tokenizer = self.model()
        corpus = Corpus(SAMPLE_CORPUS)
        stream = build_streams(self.settings(), corpus, tokenizer, model.config.max_tokens)["train"]
        sizes: Any = {"size": self.examples, "per_step": self.ranks, "workers": 0}
        steps = load_steps(stream, range(count), **sizes, rank=rank, ranks=self.ranks)
        return [batch for step in steps for batch in step]

    def engine_step(self, batches: Sequence[MicroBatch]) -> Case:
        """Returns a function that makes the next optimizer step with ZeRO-2, over and over `batches`."""
        settings, file = self.settings(), load_deepspeed_config("ds_configs/zero2.json")
        batch = batch_arithmetic(settings.train, self.ranks)
        config = complete_deepspeed_config(file, precision="fp32", **batch)
        engine = build_engine(
            prepare_deepspeed(), self.model()[0], config, settings.train, settings.objective.in_use
        )
        numbers, source = itertools.count(), itertools.cycle(batches)
        return lambda: train_step(engine, settings, [next(source)], next(numbers))

    def bert_step(self, batches: Sequence[MicroBatch]) -> Case:
        """Returns a step of BertForMaskedLM."""
        torch.manual_seed(0)
        vocabulary = read_json(sample_model() / "config.json")["vocab_size"]
        model: Any = BertForMaskedLM(BertConfig(vocab_size=vocabulary, **self.encoder())).train()
        names = ("input_ids", "attention_mask", "token_type_ids", "labels")
        return plain_step(lambda x: model(**{name: x[name] for name in names}).loss, model, batches)


def plain_step(
    loss_of: Callable[[dict[str, Tensor]], Tensor], model: nn.Module, batches: Sequence[MicroBatch]
) -> Case:
    """Returns a function that makes the next step of a plain PyTorch loop, over and over `batches`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.02, fused=True)
    source = itertools.cycle(batches)

    def step() -> None:
        loss_of(next(source).inputs).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def against_bert(report: Report, name: str, work: Workload, limit: float, rounds: int) -> None:
    """Compares the engine's step with BertForMaskedLM."""
    batches = work.batches(8)
    cases = {BERT: work.bert_step(batches), "ours, ZeRO-2": work.engine_step(batches)}
    samples = take_turns(cases, rounds=rounds, warmup=2)
    what = f"Step of {name}, {work.examples} examples"
    report.compare(what, samples, BERT, {"ours, ZeRO-2": limit})


def compare_ranks(report: Report, work: Workload, rounds: int) -> None:
    """Compares ZeRO-2 on the CPU ranks of the workload with DDP in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (work, rounds, folder), nprocs=work.ranks)
        samples = read_json(Path(folder) / "samples.json")
    report.compare(f"Step on {work.ranks} ranks, 4 x 256", samples, "DDP", {"ours, ZeRO-2": 1.08})


def _on_rank(rank: int, work: Workload, rounds: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    store = f"file://{folder}/store"  # where the ranks meet
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=work.ranks
    )
    batches, (model, _), weights = work.batches(4, rank), work.model(), work.settings().objective
    model.freeze_unused(weights.in_use)
    parallel = torch.nn.parallel.DistributedDataParallel(model)

    def loss_of(inputs: dict[str, Tensor]) -> Tensor:
        return weighted_sum(parallel(**inputs, group_size=GROUP).losses, weights.in_use)

    cases = {"ours, ZeRO-2": work.engine_step(batches)}
    cases["DDP"] = plain_step(loss_of, parallel, batches)
    samples = take_turns(cases, rounds=rounds, wait=torch.distributed.barrier)
    if rank == 0:
        write_json(Path(folder) / "samples.json", samples)
    leave_deepspeed()
