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

from benchmarks.compare import RESULTS
from multicls.corpus import Corpus
from multicls.distributed import prepare_deepspeed
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.files import read_json, write_json
from multicls.from_bert import from_bert
from multicls.sample import SAMPLE_CORPUS, sample_model
from pretrain.batches import MicroBatch, RankSampler, load_steps
from pretrain.engine import build_engine
from pretrain.job import build_streams
from pretrain.run import prepare_sample_corpus
from pretrain.settings import PretrainSettings, batch_arithmetic, settle_micro_batch
from pretrain.stopping import StopRequest
from pretrain.training import Trainer


@dataclass(frozen=True)
class Shape:
    """Size of a BERT; a head has 64 dimensions, the inner layer is four times as wide as the hidden one."""

    hidden: int
    layers: int

    def config(self) -> dict[str, int]:
        """Returns the arguments of `BertConfig`."""
        heads = max(1, self.hidden // 64)
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": heads}
        return sizes | {"intermediate_size": 4 * self.hidden}


SMALL, BASE = Shape(256, 4), Shape(768, 12)


@dataclass
class Workload:
    """A model's shape and settings of its training on the embedded sample corpus.

    Attributes:
        shape: Size of the model, with random weights; None: the sample's model with its weights.
        model: Changes of the settings' group `model`.
        data: Changes of the group `data`.
        train: Changes of the group `train`.
        objective: Changes of the group `objective`.
        ranks: Number of ranks.
    """

    shape: Shape | None
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def changed(self, **train: Any) -> Workload:
        """Returns the workload with other settings of `train`."""
        return replace(self, train=self.train | train)

    def settings(self) -> PretrainSettings:
        """Returns the settings of the run, with the micro-batch size as a number."""
        raw = {
            "model": {"checkpoint": "sample", "random_weights": self.shape is not None} | self.model,
            "data": {"corpus": "sample", "seq_length": 128, "num_workers": 0} | self.data,
            "train": {"steps": 1_000_000, "precision": "fp32"} | self.train,
            "objective": self.objective,
        }
        return settle_micro_batch(PretrainSettings.model_validate(raw), self.ranks)

    def build(self) -> tuple[Any, Any]:
        """Returns the model and the tokenizer."""
        asked = self.settings().model.model_dump(exclude={"checkpoint"})
        torch.manual_seed(0)
        with TemporaryDirectory() as folder:
            shaped = sample_model() if self.shape is None else shaped_model(Path(folder) / "m", self.shape.config())
            return from_bert(str(shaped), **asked, report=lambda line: None)

    def batches(self, count: int, size: int | None = None, rank: int = 0) -> list[MicroBatch]:
        """Returns the first micro-batches of real examples that are this rank's, of `size` examples each."""
        settings = self.settings()
        with torch.device("meta" if self.shape else "cpu"):  # only the configuration matters
            model, tokenizer = self.build()
        prepare_sample_corpus()
        stream = build_streams(settings, Corpus.open(SAMPLE_CORPUS), tokenizer, model.config)["train"]
        size, unpad = size or int(settings.train.micro_batch_size), settings.train.unpad
        sampler = RankSampler(self.ranks, rank, self.ranks)
        steps = load_steps(stream, sampler, range(count), size=size, workers=0, unpad=unpad)
        return [batch for (batch,) in steps]

    def trainer(self, stage: int = 2) -> Trainer:
        """Returns a trainer around a new model; it has no streams, checkpoints and log, and makes steps only."""
        settings = self.settings()
        where = f"ds_configs/zero{stage}.json"
        precision: Any = settings.train.precision
        arithmetic = batch_arithmetic(settings, self.ranks)
        resolved = resolve_ds_config(load_ds_config(where), where=where, precision=precision, **arithmetic)
        engine = build_engine(prepare_deepspeed(), self.build()[0], settings, resolved)
        unused: Any = None
        return Trainer(engine, settings, unused, unused, unused, unused, StopRequest())


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


def shaped_model(folder: Path, shape: dict[str, int]) -> Path:
    """Writes the sample's tokenizer and a configuration of another shape; returns the folder."""
    shutil.copytree(tokenizer_folder(), folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | shape)
    return folder


def trainer_step(trainer: Trainer, batches: Sequence[MicroBatch], per_step: int = 1) -> Callable[[], Any]:
    """Returns a function that makes the next optimizer step of `trainer`, over and over the same batches."""
    numbers, source = itertools.count(), itertools.cycle(batches)
    return lambda: trainer.train_step([next(source) for _ in range(per_step)], next(numbers))


def plain_step(
    loss_of: Callable[[dict[str, Tensor]], Tensor], model: nn.Module, batches: Sequence[MicroBatch], clip: bool = False
) -> Callable[[], Any]:
    """Returns a function that makes the next step of a plain PyTorch loop with fused AdamW.

    Args:
        loss_of: Loss of a micro-batch's inputs.
        model: The model.
        batches: Micro-batches, used over and over.
        clip: Clips the gradients to a norm of 1, as our engine does.
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
    shape: Shape, batches: Sequence[MicroBatch], device: torch.device, dtype: torch.dtype = torch.float32
) -> Callable[[], Any]:
    """Returns a step of Hugging Face's BertForMaskedLM over the same sequences, padding and all, and labels.

    The logits cover the full vocabulary at all positions. In 16 bit, weights, gradients and moments are 16-bit as well.
    """
    torch.manual_seed(0)
    vocabulary = read_json(tokenizer_folder() / "config.json")["vocab_size"]
    config: Any = BertConfig.from_dict({"vocab_size": vocabulary, **shape.config()})
    model: Any = BertForMaskedLM(config)
    model.to(device, dtype).train()
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    return plain_step(lambda inputs: model(**{name: inputs[name] for name in names}).loss, model, batches)
