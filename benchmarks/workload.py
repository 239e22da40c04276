"""Workload of the training benchmarks: a BERT of a given shape on real examples, by our trainer or in plain PyTorch."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from benchmarks.compare import RESULTS, Case
from multicls.corpus import Corpus
from multicls.distributed import prepare_deepspeed
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.files import read_json, write_json
from multicls.from_bert import from_bert
from multicls.sample import SAMPLE_CORPUS, sample_model
from multicls.settings import load_settings
from pretrain.batches import MicroBatch, RankSampler, load_steps
from pretrain.engine import build_engine
from pretrain.job import build_streams
from pretrain.run import prepare_sample_corpus
from pretrain.settings import PretrainSettings, batch_arithmetic, settle_micro_batch
from pretrain.stopping import StopRequest
from pretrain.training import Trainer

SMALL, BASE = (256, 4), (768, 12)  # hidden size and layers
DS_CONFIG = "ds_configs/zero2.json"
SETTINGS = {
    "model.checkpoint": "sample", "model.random_weights": True, "data.corpus": "sample", "data.seq_length": 128,
    "data.num_workers": 0, "train.steps": 1_000_000, "train.precision": "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A BERT with random weights and its training on the embedded sample corpus."""

    shape: tuple[int, int]  # hidden size, layers
    changes: dict[str, Any] = field(default_factory=dict)  # settings of pretrain/run.py, on top of `SETTINGS`
    ranks: int = 1

    def changed(self, **train: Any) -> Workload:
        """Returns the workload with other settings of the group `train`."""
        return replace(self, changes=self.changes | {f"train.{name}": value for name, value in train.items()})

    @property
    def settings(self) -> PretrainSettings:
        """The settings of the run, with the micro-batch size as a number."""
        return settle_micro_batch(load_settings(PretrainSettings, flags=SETTINGS | self.changes), self.ranks)

    def build(self) -> tuple[Any, Any]:
        """Returns the model and the tokenizer."""
        torch.manual_seed(0)
        with TemporaryDirectory() as place:
            folder = Path(place) / "model"
            shutil.copytree(tokenizer_folder(), folder)
            write_json(folder / "config.json", read_json(folder / "config.json") | bert_config(self.shape))
            asked = self.settings.model.model_dump(exclude={"checkpoint"})
            return from_bert(str(folder), **asked, report=lambda line: None)

    def batches(self, count: int, rank: int = 0) -> list[MicroBatch]:
        """Returns the first micro-batches of real examples that are this rank's."""
        with torch.device("meta"):  # only the configuration matters
            model, tokenizer = self.build()
        prepare_sample_corpus()
        settings, sampler = self.settings, RankSampler(self.ranks, rank, self.ranks)
        stream = build_streams(settings, Corpus.open(SAMPLE_CORPUS), tokenizer, model.config)["train"]
        size, unpad = int(settings.train.micro_batch_size), settings.train.unpad
        return [batch for (batch,) in load_steps(stream, sampler, range(count), size=size, workers=0, unpad=unpad)]

    def trainer(self) -> Trainer:
        """Returns a trainer with ZeRO-2 around a new model; it has no streams, checkpoints and log: it only steps."""
        settings = self.settings
        precision: Any = settings.train.precision
        arithmetic = batch_arithmetic(settings, self.ranks)
        resolved = resolve_ds_config(load_ds_config(DS_CONFIG), where=DS_CONFIG, precision=precision, **arithmetic)
        engine = build_engine(prepare_deepspeed(), self.build()[0], settings, resolved)
        unused: Any = None
        return Trainer(engine, settings, unused, unused, unused, unused, StopRequest())


def bert_config(shape: tuple[int, int]) -> dict[str, Any]:
    """Returns arguments of `BertConfig`: heads of 64 dimensions, inner layers four times as wide as the hidden size."""
    hidden, layers = shape
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": max(1, hidden // 64)}
    return sizes | {"intermediate_size": 4 * hidden}


def on_cpu() -> None:
    """Keeps this process on the CPU where there is a GPU; call it before anything touches CUDA."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def tokenizer_folder() -> Path:
    """Returns a folder with the sample's tokenizer and configuration, without its weights.

    It is copied once: with it and runs/sample_corpus, benchmarks run on a machine that has no sample packages.
    """
    folder = RESULTS / "tokenizer"
    if not folder.exists():
        shutil.copytree(sample_model(), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx"))
    return folder


def trainer_step(trainer: Trainer, batches: Sequence[MicroBatch], per_step: int = 1) -> Case:
    """Returns a function that makes the next optimizer step of `trainer`, over and over the same batches."""
    numbers, source = itertools.count(), itertools.cycle(batches)
    return lambda: trainer.train_step([next(source) for _ in range(per_step)], next(numbers))


def grouped_steps(shape: tuple[int, int], **train: Any) -> dict[str, Case]:
    """Returns a step of 8 groups of 10 examples: as 8 accumulated micro-batches, and in one forward pass."""
    one = Workload(shape).changed(global_batch_size=80, micro_batch_size=80, **train)
    many = one.changed(micro_batch_size=10)
    return {"8 accumulated": trainer_step(many.trainer(), many.batches(16), per_step=8),
            "8 groups in one forward": trainer_step(one.trainer(), one.batches(2))}  # fmt: skip


def plain_step(
    loss_of: Callable[[dict[str, Tensor]], Tensor], model: nn.Module, batches: Sequence[MicroBatch], clip: bool = False
) -> Case:
    """Returns a function that makes the next step of a plain PyTorch loop with fused AdamW, over and over `batches`.

    `loss_of` takes a micro-batch's inputs. `clip` clips the gradients to a norm of 1, as our engine does.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.02, fused=True)
    source, device = itertools.cycle(batches), parameters[0].device

    def step() -> None:
        loss_of(next(source).to(device).inputs).backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hugging_face_step(
    shape: tuple[int, int], batches: Sequence[MicroBatch], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Case:
    """Returns a step of Hugging Face's BertForMaskedLM over the same sequences, padding and all, and labels.

    The logits cover the full vocabulary at all positions. In 16 bit, weights, gradients and moments are 16-bit as well.
    """
    torch.manual_seed(0)
    vocabulary = read_json(tokenizer_folder() / "config.json")["vocab_size"]
    model: Any = BertForMaskedLM(BertConfig(vocab_size=vocabulary, **bert_config(shape)))
    model.to(device, dtype).train()
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    return plain_step(lambda inputs: model(**{name: inputs[name] for name in names}).loss, model, batches)
