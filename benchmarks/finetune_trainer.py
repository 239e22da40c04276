"""`--head cls` of finetune/run.py against Hugging Face's own Trainer: same checkpoint, rows, settings, evaluations.

    OMP_NUM_THREADS=2 python benchmarks/run.py finetune_trainer --data_dir glue [--model MODEL] [--epochs 3] [--seeds 5]
    OMP_NUM_THREADS=2 python benchmarks/run.py finetune_trainer --data_dir glue --check

The recipe is that of Hugging Face's text-classification example: AutoModelForSequenceClassification,
DataCollatorWithPadding, AdamW, linear schedule. Both sides take the rows that finetune/run.py drew, in batches of the
same size, for as many steps, evaluate the same dev rows at the same steps (64 at a time), keep no weights, and count
their best evaluation. STS-B's scores are divided by 5 on both sides. The sides take turns, so that both see the same
machine. Every finished run is a line in OUTPUT_DIR/runs.jsonl and is not repeated: the same command goes on where it
was stopped. Needs `pip install accelerate`.

`--check` takes away what chance there is: one epoch with the rows in the same order, the same new weights, no dropout;
and no warm-up, whose first step has learning rate 0 there and 1 / (warm-up + 1) of the peak here. What is left is
rounding.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

from benchmarks.compare import Report
from finetune.data import reading
from finetune.data.examples import LabeledExample
from finetune.data.metrics import score_examples
from finetune.data.tasks import find_task
from finetune.heads.building import build_head
from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
from finetune.run import run
from finetune.settings import FinetuneSettings, resolve
from finetune.store.results import Store
from finetune.train.loop import find_device, row_batches
from multicls.files import append_jsonl, read_json, read_jsonl, write_json
from multicls.sample import sample_model
from multicls.settings import Settings, load_settings

Run = dict[str, Any]
Outputs = np.ndarray[Any, np.dtype[np.float32]]


def ours(settings: FinetuneSettings) -> Run:
    """Makes one run of finetune/run.py; returns its score, time and size."""
    record = run(settings)[0]
    return {"score": record["score"], "seconds": record["seconds"], "steps": record["steps"],
            "evaluations": len(record["history"]), "run_id": record["run_id"]}  # fmt: skip


def theirs(settings: FinetuneSettings, run_id: str, alike: bool = False) -> tuple[Run, Outputs]:
    """Makes the same run with the Trainer, on the train rows that our run `run_id` drew.

    Args:
        alike: in the order, and from the classifier, that our run of one epoch has.

    Returns:
        Its line, and the best evaluation's outputs, (rows, classes).
    """
    task, checkpoint = find_task(settings.task), find_checkpoint(settings.model)
    data, (device, precision) = reading.read_task(task, settings.data_dir), find_device()
    drawn = Store(settings.output_dir).predictions(run_id)["train_rows"]
    tokenizer = load_tokenizer(checkpoint, settings.max_length or task.max_length)

    def encode(examples: list[LabeledExample]) -> list[dict[str, Any]]:
        texts = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        encoded = tokenizer(*texts, truncation=True, max_length=settings.max_length or task.max_length)
        labels = [row.label / task.label_scale if task.is_regression else int(row.label) for row in examples]
        return [{name: encoded[name][row] for name in encoded} | {"label": labels[row]} for row in range(len(labels))]

    assert data.train is not None, "these tasks have a train set"
    train, dev = encode([data.train[row] for row in drawn]), encode(data.dev)
    resolved = resolve(settings, [len(train)], precision)
    steps, every = int(resolved.max_steps or 0), int(resolved.eval_every or 0)
    torch.manual_seed(settings.seed)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint.folder, num_labels=task.num_labels)
    if alike:
        torch.manual_seed(settings.seed)
        model.classifier.load_state_dict(build_head(settings, checkpoint, [task]).classifiers[0].state_dict())
        batches = row_batches(len(train), int(resolved.batch_size or 0), settings.seed)
        train = [train[row] for row in chain.from_iterable(islice(batches, steps))]
    found: list[tuple[float, Outputs]] = []

    def keep(prediction: Any) -> dict[str, float]:
        outputs = np.asarray(prediction.predictions, np.float32)
        scores = score_examples(task, data.dev, outputs)
        found.append((next(iter(scores.values())), outputs))
        return scores

    arguments = TrainingArguments(
        output_dir=f"{settings.output_dir}/trainer", max_steps=steps, seed=settings.seed,
        per_device_train_batch_size=int(resolved.batch_size or 0), per_device_eval_batch_size=64,
        learning_rate=resolved.learning_rate, lr_scheduler_type="linear",
        warmup_steps=round(resolved.warmup_ratio * steps),
        weight_decay=resolved.weight_decay, adam_beta2=resolved.adam_beta2, adam_epsilon=resolved.adam_epsilon,
        max_grad_norm=resolved.max_grad_norm, eval_strategy="steps", eval_steps=every, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=device.type == "cpu",
        bf16=resolved.precision == "bf16", train_sampling_strategy="sequential" if alike else "random",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=dev, compute_metrics=keep,
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    if len(found) < math.ceil(steps / every):  # the last step's, which not every version makes
        trainer.evaluate()
    score, outputs = max(found, key=lambda evaluation: evaluation[0])
    return {"score": score, "seconds": time.perf_counter() - started, "steps": trainer.state.global_step,
            "evaluations": len(found)}, outputs  # fmt: skip


def check(settings: FinetuneSettings) -> list[Any]:
    """Returns a row of the table of `--check`."""
    folder = Path(settings.output_dir) / "no_dropout"
    shutil.copytree(find_checkpoint(settings.model).folder, folder, dirs_exist_ok=True)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    write_json(folder / "config.json", read_json(folder / "config.json") | off)
    still = settings.train.model_copy(update={"epochs": 1, "warmup_ratio": 0.0})
    settings = settings.model_copy(update={"model": str(folder), "train": still})
    one, task = ours(settings), find_task(settings.task)
    mine = Store(settings.output_dir).predictions(one["run_id"])
    outputs = mine["scores"][:, None] / task.label_scale if task.is_regression else mine["logits"]
    two, others = theirs(settings, one["run_id"], alike=True)
    off_by, most = np.abs(outputs - others.reshape(outputs.shape)).max(), np.abs(outputs).max()
    scores = [f"{100 * side['score']:.3f}" for side in (one, two)]
    return [task.name, one["steps"], *scores, f"{off_by:.1e}", f"{most:.2f}"]


def table(runs: pd.DataFrame) -> list[list[Any]]:
    """Returns rows: means and standard errors of both sides in percent, their difference, and the ratio of the times.

    The ratio is the median over seeds, since the machine may do other work in some of them.
    """
    rows: list[list[Any]] = []
    for task, here in runs.groupby("task", sort=False):
        work = here[["steps", "evaluations"]].drop_duplicates().to_numpy()
        assert len(work) == 1, f"{task}: the sides did not do the same work: {work}"
        both = here.pivot(index="seed", columns="side", values=["score", "seconds", "wall_seconds"]).dropna()
        mean, error = 100 * both["score"].mean(), 100 * both["score"].sem()
        off = (mean["ours"] - mean["theirs"]) / math.hypot(*error)
        scores = [f"{mean[side]:.2f}" + ("" if len(both) == 1 else f" ± {error[side]:.2f}") for side in SIDES]
        ratios = [(both[key, "ours"] / both[key, "theirs"]).median() for key in ("seconds", "wall_seconds")]
        rows.append([task, len(both), *scores, f"{off:+.2f}" if math.isfinite(off) else "-",
                     "{}, {}".format(*work[0]), *ratios])  # fmt: skip
    return rows


SIDES = ("ours", "theirs")
CHECKED = ("task", "steps", "finetune/run.py", "Trainer", "largest difference of an output", "largest output")
COMPARED = ("task", "seeds", "finetune/run.py", "Trainer", "difference / its standard error", "steps, evaluations",
            "time, ours / theirs", "with set-up")  # fmt: skip


class Options(Settings):
    """Options of the benchmark."""

    data_dir: str = Field(description="the folder of GLUE in the official layout")
    model: str = Field("", description="default: the MiniLM of the sample")
    tasks: list[str] = Field(["rte", "mrpc", "cola", "stsb"], description="tasks")
    seeds: int = Field(5, description="seeds 1 to this number")
    epochs: int = Field(3, description="passes over the train rows")
    batch_size: int = Field(16, description="rows of a step")
    learning_rate: float = Field(5e-5, description="peak learning rate")
    rows: str = Field("full", description="train rows, for a small try")
    output_dir: str = Field("runs/finetune_trainer", description="folder of both sides' results")
    check: bool = Field(False, description="one epoch without chance: equal but for rounding?")


def main(args: Options, argv: Sequence[str]) -> None:
    """Runs what is not there yet, one side after the other, and prints the table."""
    args = args.model_copy(update={"model": args.model or str(sample_model())})
    log = Path(args.output_dir) / "runs.jsonl"
    key = {name: getattr(args, name) for name in ("model", "epochs", "batch_size", "learning_rate", "rows")}

    def settings_of(task: str, seed: int) -> FinetuneSettings:
        return load_settings(FinetuneSettings, [], [], {
            "model": args.model, "task": task, "head": "cls", "train_size": args.rows, "seed": seed,
            "data_dir": args.data_dir, "output_dir": args.output_dir, "train.epochs": args.epochs,
            "train.batch_size": args.batch_size, "train.learning_rate": args.learning_rate,
        })  # fmt: skip

    if args.check:
        report = Report("finetune_trainer.check", "finetune/run.py against Trainer, without chance", argv)
        report.table("One epoch", CHECKED, [check(settings_of(task, 1)) for task in args.tasks])
        report.write()
        return
    for seed, task in product(range(1, args.seeds + 1), args.tasks):
        mark, settings = {"task": task, "seed": seed, "key": key}, settings_of(task, seed)
        done = {one["side"]: one for one in read_jsonl(log) if one.items() >= mark.items()}
        for side in SIDES:
            if side not in done:
                started = time.perf_counter()
                one = ours(settings) if side == "ours" else theirs(settings, done["ours"]["run_id"])[0]
                done[side] = one | mark | {"side": side, "wall_seconds": time.perf_counter() - started}
                append_jsonl(log, done[side])
                print(f"{task} seed {seed} {side}: {100 * one['score']:.2f} in {one['seconds']:.0f} s", flush=True)
    report = Report("finetune_trainer", "finetune/run.py against Trainer", argv)
    runs = [one for one in read_jsonl(log) if one["key"] == key and one["task"] in args.tasks]
    report.table("Scores in percent", COMPARED, table(pd.DataFrame(runs)))
    report.write()
