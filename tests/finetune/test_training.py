"""Training: equal to a plain loop, to other ranks and micro-batches, and to itself after a kill."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from finetune.benchmark_tasks import read_task
from finetune.heads.build import build_model
from finetune.run import run_finetune
from finetune.saved import SavedSystem
from finetune.subsets import draw_rows
from finetune.tasks import TASKS
from finetune.training import (
    StepPlan,
    TaskTrainer,
    row_batches,
    task_batches,
)
from multicls.errors import UserError
from multicls.files import REPOSITORY, read_json, write_json
from multicls.optim import dropout_seed
from multicls.settings import to_yaml
from tests.finetune.conftest import Tune
from tests.finetune.runs import finetune, logits_of, score_of, settings_of
from tests.finetune.test_isobn import assert_ranks_are_one_batch
from tests.processes import completed, free_ports, program, until

SST2 = replace(TASKS["sst2"], max_length=24)
PLAIN: dict[str, Any] = {
    "train__learning_rate": 1e-3,
    "train__warmup_ratio": 0.5,
    "train__weight_decay": 1.0,
    "train__max_grad_norm": 0.5,
    "train__batch_size": 5,
    "train__max_steps": 4,
    "train__eval_every": 4,
    "train_size": 12,
    "seed": 3,
}


@pytest.fixture(scope="module")
def still_bert(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT without dropout."""
    folder = tmp_path_factory.mktemp("still") / "bert"
    shutil.copytree(tiny_bert, folder)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_json(folder / "config.json", read_json(folder / "config.json") | off)
    return folder


def plain_loop(folder: Path, glue: Path, **changes: float) -> np.ndarray[Any, Any]:
    """Trains Hugging Face's classifier by a plain loop and returns its outputs for the dev rows."""
    values = {"max_grad_norm": 0.5, "weight_decay": 1.0} | changes
    data = read_task(TASKS["sst2"], str(glue))
    start, tokenizer = build_model(settings_of(folder, glue, Path("x"), seed=3), [SST2])
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).train()
    model.classifier.load_state_dict(start.classifiers[0].state_dict())
    named = list(model.named_parameters())
    plain = {name for name, _ in named if "bias" in name or "LayerNorm" in name}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name not in plain]},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=values["weight_decay"])
    train = [data.train[row] for row in draw_rows(len(data.train), 12, 1)]
    for step, rows in enumerate(islice(row_batches(12, 5, 3), 4)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(step, 4 - step) / 2  # two steps of warm-up, two of decay
        batch = tokenizer([train[r].texts[0] for r in rows], padding=True, return_tensors="pt")
        labels = torch.tensor([int(train[r].label) for r in rows])
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), values["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    batch = tokenizer([row.texts[0] for row in data.dev], padding=True, return_tensors="pt")
    with torch.no_grad():
        return np.asarray(model.eval()(**batch).logits.numpy())


def test_cls_learns_what_a_plain_loop_learns(still_bert: Path, glue: Path, tmp_path: Path) -> None:
    """Batches of 5, 5, 2 and 5 rows; the controls are what this would otherwise not notice."""
    record = finetune(still_bert, glue, tmp_path, **PLAIN)
    np.testing.assert_allclose(logits_of(record), plain_loop(still_bert, glue), atol=2e-5)
    for other in ({"max_grad_norm": 1e9}, {"weight_decay": 0.0}):
        assert np.abs(logits_of(record) - plain_loop(still_bert, glue, **other)).max() > 5e-5


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4))
def test_ranks_share_the_steps_of_one_rank(size: int, batch: int, world: int) -> None:
    """Together the ranks see each row of each step once, in equal parts, and each runs the model once."""
    train = {"train__batch_size": batch, "train__max_steps": 5}
    settings = settings_of("m", Path("x"), Path("x"), **train)
    plans = []
    for rank in range(world):
        with mock.patch("finetune.training.rank_and_world", return_value=(rank, world)):
            plans.append(StepPlan(settings, [size, 3]))
    batches = islice(task_batches([size, 3], batch, 1, "proportional"), 5)
    for *shares, (task, rows) in zip(*plans, batches, strict=True):
        assert [row for share in shares if share.counted for row in share.rows] == rows
        assert {(share.task, share.rows_of_step) for share in shares} == {(task, len(rows))}
        sizes = [len(share.rows) * share.counted for share in shares]
        assert max(sizes) - min(sizes) <= 1 and all(share.rows for share in shares)


def test_epochs_hold_every_row_of_every_task_once_and_round_robin_takes_turns() -> None:
    batches = task_batches([10, 30, 5], 4, 1, "proportional")
    epoch = [next(batches) for _ in range(3 + 8 + 2)]
    for task, size in enumerate((10, 30, 5)):
        seen = sorted(row for own, rows in epoch for row in rows if own == task)
        assert seen == list(range(size))
    assert [task for task, _ in epoch] != sorted(task for task, _ in epoch), "mixed"
    turns = task_batches([10, 30, 5], 4, 1, "round_robin")
    assert [next(turns)[0] for _ in range(20)] == [0, 1, 2] * 6 + [0, 1]


def test_of_equal_scores_the_lower_loss_wins_and_the_last_step_has_a_loss_of_its_own(
    tune: Tune,
) -> None:
    """Evaluated after 15, 30 and 40 steps; the scores are made equal."""
    with mock.patch("finetune.training.score_predictions", return_value={"acc": 0.5}):
        record = tune(train__max_steps=40, train__eval_every=15)
    steps, losses, scores, picking = (
        [entry[name] for entry in record["history"]]
        for name in ("step", "loss", "score", "selection_loss")
    )
    assert steps == [15, 30, 40] and scores == [0.5] * 3 and len(set(losses)) == 3
    assert record["best_step"] == steps[int(np.argmin(picking))] > 15


def test_holdout_reports_the_best_weights_not_the_last(tune: Tune, glue: Path) -> None:
    common = {"train_size": 40, "selection": "holdout", "train__eval_every": 4, "train__epochs": 4}
    record = tune(**common, save_model=True)
    scores = {entry["step"]: entry["score"] for entry in record["history"]}
    assert score_of(record, "validation") == max(scores.values())
    ranked = {e["step"]: (e["score"], -e["selection_loss"]) for e in record["history"]}
    assert record["best_step"] == max(ranked, key=lambda step: ranked[step])
    (entry,) = record["tasks"]
    assert (entry["train_rows"], entry["splits"]["validation"]["rows"]) == (32, 8)
    dev = [row.texts for row in read_task(TASKS["sst2"], str(glue)).dev]
    again = SavedSystem(Path(record["path"]) / "model").predict(dev)
    np.testing.assert_allclose(again, logits_of(record), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": "ds_configs/zero3.json"}, "no ZeRO stage 3 here"),
        ({"train__learning_rate": 1e38, "train__max_grad_norm": 1e30}, "not a finite number"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    values: dict[str, Any], message: str, tune: Tune, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        tune(train__max_steps=4, **values)
    assert not list(tmp_path.glob("*/*/*/record.json"))


def test_settings_of_adam_are_used(still_bert: Path, glue: Path, tmp_path: Path) -> None:
    plain = logits_of(finetune(still_bert, glue, tmp_path / "a", **PLAIN))
    for name, value in (("train__adam_beta2", 0.9), ("train__adam_epsilon", 1e-2)):
        other = logits_of(finetune(still_bert, glue, tmp_path / name, **PLAIN | {name: value}))
        assert np.abs(plain - other).max() > 1e-5


def command(folder: Path, settings: Any) -> list[str]:
    """Returns the command of a run, by a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(to_yaml(settings))
    words = [str(REPOSITORY / "finetune" / "run.py"), "--recipe", str(folder / "run.yaml")]
    return [sys.executable, *words]


def newest(folder: Path) -> int:
    """Returns the step of the newest whole checkpoint."""
    steps = [path.parent.name.rpartition("-")[2] for path in folder.glob("checkpoint-*/run.json")]
    return max(map(int, steps), default=0)


def has_passed(folder: Path, step: int, process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None or newest(folder) > step


LONG: dict[str, Any] = {
    "train__max_steps": 60,
    "train__eval_every": 5,
    "train__checkpoint_minutes": 1e-9,
    "selection": "holdout",
}


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_numbers(
    tune: Tune,
    tiny_bert: Path,
    glue: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After kill -9; a half-written checkpoint is not used."""
    expected = tune(output_dir=str(tmp_path / "a"), **LONG)
    settings = settings_of(tiny_bert, glue, tmp_path / "b", **LONG)
    folder = settings.folder
    process = subprocess.Popen(command(tmp_path, settings), cwd=REPOSITORY)
    until(partial(has_passed, folder, 20, process))
    process.kill()
    process.wait()
    assert not (folder / "record.json").exists()
    (folder / "checkpoint-55").mkdir(exist_ok=True)
    record = run_finetune(settings)
    assert "resuming from step" in capsys.readouterr().out
    assert record["history"] == expected["history"]
    assert record["best_step"] == expected["best_step"]
    np.testing.assert_array_equal(logits_of(record), logits_of(expected))
    assert not list(folder.glob("checkpoint-*"))


def test_a_checkpoint_of_other_settings_is_not_used(
    tune: Tune,
    tiny_bert: Path,
    glue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named, and stays until the run has one of its own; that of other ranks is resumed."""
    folder = settings_of(tiny_bert, glue, tmp_path, **LONG).folder
    with monkeypatch.context() as patch:  # killed while it writes its predictions
        patch.setattr("finetune.run.write_run", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tune(**LONG | {"train__max_steps": 50})
        assert newest(folder) == 45 and not (folder / "record.json").exists()
        for error in (UserError("model"), KeyboardInterrupt()):
            patch.setattr(TaskTrainer, "train_step", mock.Mock(side_effect=error))
            with pytest.raises(type(error)):
                tune(**LONG | {"train__max_steps": 10})
        assert newest(folder) == 45, "kept: nothing better is there yet"
    assert "it is of another run (train.max_steps 50, not 10)" in capsys.readouterr().out
    mark = folder / "checkpoint-45" / "run.json"
    write_json(mark, read_json(mark) | {"ranks": 2})
    trainer = mock.Mock(settings=mock.Mock(config="ds_configs/zero2.json"), folder=folder)
    trainer.identity = read_json(mark) | {"ranks": 1}
    with pytest.raises(UserError, match=r"ranks 2, not 1, which DeepSpeed cannot read"):
        TaskTrainer.newest_checkpoint(trainer)
    state = torch.load(folder / "checkpoint-45" / "run.pt", weights_only=True)
    torch.save(state | {"seconds": 1000.0}, folder / "checkpoint-45" / "run.pt")
    record = tune(**LONG | {"train__max_steps": 50})
    assert "resuming from step 45 of 50" in capsys.readouterr().out
    assert [entry["step"] for entry in record["history"]] == list(range(5, 51, 5))
    assert 1000 < record["seconds"] < 1100, "those before it resumed count"


rank_cases = Path(__file__).with_name("rank_cases.py")  # which imports this module
RANKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "isobn": {"head": "isobn", "selection": "holdout", "train__batch_size": 4},
    "cln": {"head": "cln", "task": "sst2,stsb"},
    "zero1": {"config": "ds_configs/zero1.json"},
    "zero2": {"config": "ds_configs/zero2.json"},
}


def case(name: str, model: str, glue: str, output: str, several: bool) -> Any:
    """17 rows and batches of 4: the last batch of an epoch has fewer rows than there are ranks."""
    common: dict[str, Any] = {"train_size": 17, "train__max_steps": 10, "train__eval_every": 5}
    values = common | RANKS[name]
    if not several:
        values["config"] = ""
    return settings_of(model, Path(glue), Path(output) / name, **values)


@pytest.fixture(scope="module")
def launched(still_bert: Path, glue: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [program("torchrun"), "--nproc_per_node=2", f"--master_port={free_ports(1)[0]}"]
    words = [*torchrun, rank_cases, still_bert, glue, folder]
    done = completed(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_equal_one(
    name: str, launched: Path, still_bert: Path, glue: Path, tmp_path: Path
) -> None:
    alone = run_finetune(case(name, str(still_bert), str(glue), str(tmp_path), several=False))
    together = read_json(next((launched / name).glob("*/*/*/record.json")))
    assert (alone["ranks"], together["ranks"]) == (1, 2)
    losses = [[e["loss"] for e in record["history"]] for record in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for task in range(len(alone["tasks"])):
        np.testing.assert_allclose(
            logits_of(together, task=task), logits_of(alone, task=task), rtol=5e-3, atol=5e-3
        )


@pytest.mark.slow
@pytest.mark.launcher
def test_normalisation_takes_the_rows_of_both_ranks_for_one_batch(launched: Path) -> None:
    assert_ranks_are_one_batch(launched)


def test_each_step_has_its_own_dropout(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of the same rows at a rate of 0: only dropout changes the loss."""
    seeds = mock.Mock(wraps=dropout_seed)
    monkeypatch.setattr("finetune.training.dropout_seed", seeds)
    train = {"max_steps": 4, "eval_every": 1, "learning_rate": 1e-30}
    record = tune(**{f"train__{key}": value for key, value in train.items()}, train_size=4, seed=3)
    assert seeds.call_args_list == [mock.call(3, number) for number in range(4)]
    assert np.ptp([entry["loss"] for entry in record["history"]]) > 1e-4
