"""A run that is killed, signalled, moved to other numbers of ranks or out of disk ends as one left alone."""

import json
import os
import random
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from multicls.files import read_json, read_jsonl
from pretrain.export import restore_model
from pretrain.folder import RunFolder
from tests.encoders import encoder_config
from tests.pretrain.conftest import Fork, logs, weights

pytestmark = pytest.mark.launcher
VARYING = ("speed/", "memory/")
KILLS = int(os.environ.get("MULTICLS_KILLS", "3"))  # more take minutes


@pytest.fixture(scope="module")
def disturb(fork: Fork) -> Fork:
    """`fork` with lines of metrics over several steps, and steps for up to four ranks."""

    def run(folder: Path, *launches: dict[str, Any], flags: tuple[str, ...] = ()) -> Any:
        flags += ("--run.log_every", "3", "--run.eval_every", "3", "--global_batch_size", "12")
        return fork(folder, *launches, flags=flags)

    return run


@pytest.fixture(scope="module")
def alone(disturb: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert disturb(folder, {}) == [[0]]
    return folder


def metrics(folder: Path, *splits: str) -> list[dict[str, Any]]:
    """Returns the records of some splits in metrics.jsonl without speed and memory."""
    return [
        {name: value for name, value in record.items() if not name.startswith(VARYING)}
        for record in read_jsonl(folder / "metrics.jsonl")
        if record["split"] in splits
    ]


def examples(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns, by step, the examples of each micro-batch in the last launch that took the step."""
    taken: dict[int, tuple[str, dict[str, Any]]] = {}
    for record in read_jsonl(folder.with_name("examples.jsonl")):
        launch, found = taken.get(record["step"], ("", {}))
        others = found if launch == record["launch"] else {}  # of other ranks
        taken[record["step"]] = record["launch"], record["examples"] | others
    return {step: found for step, (_, found) in taken.items()}


def assert_same_to_the_bit(folder: Path, other: Path) -> None:
    """Weights and validations. The windows of the training metrics end where a run has stopped."""
    assert weights(folder) == weights(other)
    assert metrics(folder, "validation") == metrics(other, "validation")


def assert_same_losses_and_weights(folder: Path, other: Path, rtol: float = 1e-4) -> None:
    """Compares losses and weights within what sums over other numbers of ranks differ by."""
    validations = metrics(folder, "validation"), metrics(other, "validation")
    for ours, theirs in zip(*validations, strict=True):
        losses = {name: value for name, value in theirs.items() if name.startswith("loss/")}
        assert losses and {name: ours[name] for name in losses} == pytest.approx(losses, rel=rtol)
    expected = load_file(other / "hf" / "model.safetensors")
    for name, weight in load_file(folder / "hf" / "model.safetensors").items():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding
            torch.testing.assert_close(weight, expected[name], rtol=10 * rtol, atol=rtol)


def test_new_weights_keep_their_learning_rate(disturb: Fork, tmp_path: Path) -> None:
    """The base model lacks facets, TF-IDF and order heads, of which the run trains all but the order head."""
    flags: tuple[str, ...] = ("--model.random_weights", "false", "--train.head_lr_factor", "10")
    flags += ("--objective.so", "0", "--steps", "4", "--run.save_every", "2")
    runs = [tmp_path / name / "run" for name in ("alone", "killed")]
    for run in runs:
        run.parent.mkdir()
    assert disturb(runs[0], flags=flags) == [[0]], logs(runs[0])
    killed: dict[str, Any] = {"accident": "killed in a step", "step": 3}
    assert disturb(runs[1], killed, {}, flags=flags) == [[-9], [0]], logs(runs[1], 1)
    assert "resuming from step" in logs(runs[1], 1)
    assert_same_to_the_bit(*runs)
    model: Any = restore_model(RunFolder(runs[1]))[0]
    ends = {"facets.weight", "dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias"}
    ends |= {"decoder.weight", "decoder.bias", "classifier.weight", "classifier.bias"}
    ends |= {"transform.weight", "transform.bias"}
    assert {".".join(name.split(".")[-2:]) for name in model.new_weights} == ends
    order = [name for name in model.new_weights if name.startswith("order.")]
    assert read_json(runs[1] / "hf" / "export.json")["new_weights"] == sorted(order)


def test_killed_again_and_again(disturb: Fork, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launches = [
        {"accident": "killed in a save", "step": 3},  # of the first checkpoint
        {"accident": "killed in a step", "step": 6},
        {"accident": "killed in a file", "step": 7},
        {"accident": "killed in the marker", "step": 7},
        {"accident": "killed in an evaluation", "step": 7},  # after the save
        {"accident": "killed in a rename"},
        {"accident": "killed in the end"},
        {},
    ]
    assert disturb(folder, *launches) == [[-9]] * 7 + [[0]]
    begins = [*["fresh run"] * 2, *["resuming from step 4"] * 3, *["resuming from step 8"] * 3]
    for number, begin in enumerate(begins):
        assert begin in logs(folder, number), number
    assert_same_to_the_bit(folder, alone)
    assert metrics(folder, "train") == metrics(alone, "train")
    assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}
    whole = {path.parent.name for path in (folder / "checkpoints").glob("*/COMPLETE")}
    folders = {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()}
    assert whole == folders == {"step_00000004", "step_00000008"}


@pytest.mark.slow
def test_signals_save_and_leave_at_once(disturb: Fork, alone: Path, tmp_path: Path) -> None:
    """Between two checkpoints, and where a validation is due: it waits until the run is resumed."""
    folder = tmp_path / "run"
    signals = {"SIGTERM": 0, "SIGUSR1": 2, "SIGINT": 4}
    stops = [{"accident": name, "step": step} for name, step in signals.items()]
    assert disturb(folder, *stops, {}) == [[0]] * 4
    for number, step in enumerate((1, 3, 5)):
        assert f"{stops[number]['accident']}: saving after this step" in logs(folder, number)
        assert f"the same command resumes: checkpoint at step {step}" in logs(folder, number)
    assert "step 3  validation" not in logs(folder, 1) and "step 3  validation" in logs(folder, 2)
    assert "resuming from step 5" in logs(folder, 3) and not (folder / "STOPPED").exists()
    assert_same_to_the_bit(folder, alone)


def test_other_micro_batches_are_said_and_change_no_example(
    disturb: Fork, alone: Path, tmp_path: Path
) -> None:
    """Micro-batches of another size draw other dropout masks, so that the weights differ."""
    stop, folder = {"accident": "SIGTERM", "step": 2}, tmp_path / "run"
    assert disturb(folder, stop) == [[0]] and "micro_batch_size was" not in logs(folder)
    assert disturb(folder, {}, flags=("--micro_batch_size", "6")) == [[0]], logs(folder)
    assert logs(folder).count("micro_batch_size was 3 and is now 6: the same examples") == 1
    found, expected = (
        {step: sorted(chain(*taken.values())) for step, taken in examples(run).items()}
        for run in (folder, alone)
    )
    assert found == expected and weights(folder) != weights(alone)
    for step, taken in examples(folder).items():
        assert {len(rows) for rows in taken.values()} == ({3} if step < 3 else {6})


@pytest.mark.slow
def test_a_signal_to_all_processes_saves(disturb: Fork, tmp_path: Path) -> None:
    """SLURM signals all processes of a job, a terminal those of the foreground: loaders live on until the save."""
    launch, flags = {"accident": "all get SIGUSR1", "step": 3}, ("--data.num_workers", "2")
    assert disturb(tmp_path / "run", launch, flags=flags) == [[0]], logs(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "STOPPED").read_text()) == {
        "step": 4,
        "reason": "SIGUSR1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1,), (1, 2, 1)])
def test_random_kills(disturb: Fork, alone: Path, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """A rank is killed at any moment, its set-up included; the next launch may have another number of ranks."""
    rng, kills, folders = random.Random(len(ranks)), 0, count()
    while kills < KILLS:
        folder = tmp_path / str(next(folders)) / "run"
        folder.parent.mkdir()
        launches: list[dict[str, Any]] = []
        for n in ranks * (4 // len(ranks)):
            launch = {"ranks": n, "on": rng.randrange(n), "launcher": True}
            launches.append(launch | {"accident": f"killed after {rng.uniform(0.05, 0.8)} s"})
        codes = disturb(folder, *launches, {})
        killed = [codes[n][launch["on"]] == -9 for n, launch in enumerate(launches)]
        assert None not in chain(*codes) and codes[-1] == [0], (launches, codes)
        kills += sum(killed)
        assert examples(folder) == examples(alone)
        same = assert_same_to_the_bit if ranks == (1,) else assert_same_losses_and_weights
        same(folder, alone)


@pytest.mark.slow
def test_bf16_on_another_number_of_ranks(disturb: Fork, alone: Path, tmp_path: Path) -> None:
    flags = ("--train.precision", "bf16")
    run, stop = tmp_path / "run", {"accident": "SIGTERM", "step": 2, "ranks": 2}
    assert disturb(run, stop, {}, flags=flags) == [[0, 0], [0]], logs(run, 1)
    assert "checkpoint of 2 rank(s) converted for 1" in logs(run, 1)
    assert_same_losses_and_weights(run, alone, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_numbers_of_ranks(disturb: Fork, alone: Path, tmp_path: Path, stage: int) -> None:
    """One signalled rank takes all along; others continue with the same examples and the same losses."""
    run, flags = tmp_path / "run", ("--config", f"ds_configs/zero{stage}.json")
    launches = [
        {"accident": "SIGTERM", "step": 2, "ranks": 2, "on": 1},
        {"accident": "SIGUSR1", "step": 5, "ranks": 4},
        {},
    ]
    assert disturb(run, *launches, flags=flags) == [[0, 0], [0] * 4, [0]], logs(run, 2)
    assert "checkpoint of 2 rank(s) converted for 4" in logs(run, 1)
    assert "checkpoint of 4 rank(s) converted for 1" in logs(run, 2)
    assert examples(run) == examples(alone) and not list((run / "checkpoints").glob("*universal*"))
    assert_same_losses_and_weights(run, alone)


@pytest.mark.slow
def test_deberta_under_zero_3(disturb: Fork, tiny_bert: Path, tmp_path: Path) -> None:
    """DeBERTa's dropout in evaluation returns a weight itself, which DeepSpeed then counts among those of the layer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model = AutoModelForMaskedLM.from_config(encoder_config("deberta-v2", tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "start")
    flags = ("--model", str(tmp_path / "start"), "--config", "ds_configs/zero3.json")
    stop = {"accident": "SIGTERM", "step": 2}
    assert disturb(tmp_path / "run", stop, {}, flags=flags) == [[0]] * 2, logs(tmp_path / "run", 1)


@pytest.mark.slow
def test_a_full_disk_loses_nothing(disturb: Fork, alone: Path, tmp_path: Path) -> None:
    """One line, older checkpoints whole; with room the same command ends as the undisturbed run."""
    folder = tmp_path / "run"
    launches = [{"accident": "full disk in a save", "step": 7}, {}]
    assert disturb(folder, *launches) == [[2], [0]], logs(folder)
    (line,) = [line for line in logs(folder).splitlines() if line.startswith("error: ")]
    assert "File too large" in line and "make room" in line and "Traceback" not in logs(folder)
    assert "resuming from step 4" in logs(folder, 1)
    assert_same_to_the_bit(folder, alone)


def test_lost_checkpoints_are_no_reason_to_start_again(disturb: Fork, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "split": "train"}\n')
    assert disturb(tmp_path / "run", {}) == [[2]]
    assert "reports step 7, but holds no checkpoint" in logs(tmp_path / "run", 0)
