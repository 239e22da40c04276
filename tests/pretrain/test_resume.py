"""A run that is killed, signalled, moved to other numbers of ranks or out of disk ends as one left alone."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from multicls.files import read_jsonl
from tests.pretrain.conftest import Fork, said, weights

pytestmark = pytest.mark.launcher
VARYING = ("speed/", "memory/")


@pytest.fixture(scope="module")
def disturb(fork: Fork) -> Fork:
    """`fork` with lines of metrics over several steps, and steps for up to four ranks."""

    def run(folder: Path, *launches: dict[str, Any], flags: tuple[str, ...] = ()) -> list[list[int | None]]:
        return fork(folder, *launches, flags=("--set", "run.log_every=3", "--global_batch_size", "12", *flags))

    return run


@pytest.fixture(scope="module")
def undisturbed(disturb: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert disturb(folder, {}) == [[0]]
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl without speed and memory."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if not name.startswith(VARYING)} for record in records]


def examples(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns, by step, the examples of each micro-batch in the last launch that took the step."""
    taken: dict[int, tuple[str, dict[str, Any]]] = {}
    for record in read_jsonl(folder.with_name("examples.jsonl")):
        launch, found = taken.get(record["step"], ("", {}))
        taken[record["step"]] = record["launch"], record["examples"] | (found if launch == record["launch"] else {})
    return {step: found for step, (_, found) in taken.items()}


def optimizer_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                collect(f"{prefix}/{key}", item)

    for file in (folder / "checkpoints" / "step_00000008").glob("*.pt"):
        collect(file.name, torch.load(file, weights_only=False))
    return found


def assert_same_to_the_bit(folder: Path, other: Path) -> None:
    assert weights(folder) == weights(other)
    ours, theirs = optimizer_state(folder), optimizer_state(other)
    assert ours.keys() == theirs.keys() and any("exp_avg_sq" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(folder) == metrics(other)


def assert_same_losses(folder: Path, other: Path) -> None:
    for ours, theirs in zip(metrics(folder), metrics(other), strict=True):
        losses = {name: value for name, value in theirs.items() if name.startswith("loss/")}
        assert {name: ours[name] for name in losses} == pytest.approx(losses, rel=1e-4)


def test_killed_again_and_again(disturb: Fork, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launches = [
        {"accident": "killed in a step", "step": 2},  # before the first checkpoint
        {"accident": "killed in a step", "step": 6},
        {"accident": "killed in an evaluation", "step": 7},
        {"accident": "killed in a save", "step": 8},
        {"accident": "killed before the marker", "step": 8},
        {"accident": "killed in an export"},
        {"accident": "killed after the export"},
        {},
    ]
    assert disturb(folder, *launches) == [[-9]] * 7 + [[0]]
    begins = ["fresh run", "fresh run", *["resuming from step 4"] * 4, *["resuming from step 8"] * 2]
    for number, begin in enumerate(begins):
        assert begin in said(folder, number), number
    assert_same_to_the_bit(folder, undisturbed)
    assert {path.name for path in folder.iterdir()} == {path.name for path in undisturbed.iterdir()}
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    assert checkpoints == {"step_00000004", "step_00000008"}


def test_signals_save_and_leave(disturb: Fork, undisturbed: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a window of metrics and between two regular checkpoints."""
    folder = tmp_path / "run"
    stops = [{"accident": name, "step": step} for name, step in (("SIGTERM", 0), ("SIGUSR1", 1), ("SIGINT", 4))]
    assert disturb(folder, *stops, {}) == [[0]] * 4
    for number, step in enumerate((1, 2, 5)):
        assert f"{stops[number]['accident']}: saving after this step" in said(folder, number)
        assert f"checkpoint at step {step}; the same command goes on" in said(folder, number)
    assert "resuming from step 5" in said(folder, 3) and not (folder / "STOPPED").exists()
    assert_same_to_the_bit(folder, undisturbed)


@pytest.mark.slow
def test_one_signalled_rank_takes_all_along_and_others_go_on(disturb: Fork, undisturbed: Path, tmp_path: Path) -> None:
    """One rank, two of which one is signalled, one, two, four: the same examples and the same losses."""
    folder = tmp_path / "run"
    launches = [
        {"accident": "SIGTERM", "step": 1},
        {"accident": "SIGUSR1", "step": 4, "ranks": 2, "on": 1},
        {"accident": "killed in a step", "step": 6},
        {"accident": "killed in a step", "step": 6, "ranks": 2, "on": 1},
        {"ranks": 4},
    ]
    assert disturb(folder, *launches) == [[0], [0, 0], [-9], [1, -9], [0] * 4]  # the other rank does not wait for ever
    assert "error: rank 0 lost contact with another rank in step 7" in said(folder, 3)
    for launch, (old, new) in {1: (1, 2), 2: (2, 1), 4: (2, 4)}.items():
        assert f"checkpoint of {old} rank(s) converted for {new} rank(s)" in said(folder, launch)
    assert examples(folder) == examples(undisturbed)
    assert not list((folder / "checkpoints").glob("*universal*"))
    assert_same_losses(folder, undisturbed)
    assert weights(folder).keys() == weights(undisturbed).keys()


KILLS = int(os.environ.get("MULTICLS_KILLS", "4"))  # more take minutes


@pytest.mark.slow
@pytest.mark.parametrize("most_ranks", [1, 2])
def test_random_disturbances(disturb: Fork, undisturbed: Path, tmp_path: Path, most_ranks: int) -> None:
    """Runs that are killed and signalled at random train on the same examples, on one rank or on one and two."""
    rng = random.Random(most_ranks)
    for number in range(0, KILLS, 4):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        launches, expected = list[dict[str, Any]](), []
        for step in sorted(rng.sample(range(7), min(4, KILLS - number))):
            accident = rng.choice(("killed in a step", "killed in an evaluation", "SIGTERM", "SIGUSR1"))
            ranks = rng.randint(1, most_ranks)
            launches.append({"accident": accident, "step": step, "ranks": ranks, "on": rng.randrange(ranks)})
            expected.append([0 if accident.startswith("SIG") else 1] * ranks)
            if accident.startswith("killed"):
                expected[-1][launches[-1]["on"]] = -9
        assert disturb(folder, *launches, {}) == [*expected, [0]], (launches, said(folder, len(launches)))
        assert examples(folder) == examples(undisturbed)
        (assert_same_to_the_bit if most_ranks == 1 else assert_same_losses)(folder, undisturbed)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.slow
def test_other_numbers_of_ranks_at_other_stages(disturb: Fork, undisturbed: Path, tmp_path: Path, stage: int) -> None:
    launches = [{"accident": "SIGTERM", "step": 2, "ranks": 2}, {"accident": "SIGTERM", "step": 5, "ranks": 4}, {}]
    flags = ("--config", f"ds_configs/zero{stage}.json")
    assert disturb(tmp_path / "run", *launches, flags=flags) == [[0, 0], [0] * 4, [0]]
    assert_same_losses(tmp_path / "run", undisturbed)


def test_full_disk_keeps_the_run_alive(disturb: Fork, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert disturb(folder, {"accident": "full disk", "step": 4}, flags=("--set", "run.save_every=2")) == [[0]]
    warning = "WARNING: the checkpoint of step 4 could not be written: [Errno 27] File too large."
    for text in (said(folder, 0), (folder / "log.txt").read_text()):
        assert text.count(warning) == 2  # when it happened, and on the next line of metrics
        assert "The newest one is of step 2; make room on the disk." in " ".join(text.split())
    assert weights(folder) == weights(undisturbed) and metrics(folder)[-1] == metrics(undisturbed)[-1]


def test_damaged_checkpoint_is_passed_over(disturb: Fork, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert disturb(folder, {"accident": "SIGTERM", "step": 5}) == [[0]]
    (file,) = (folder / "checkpoints" / "step_00000006").glob("*optim_states.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert disturb(folder, {}) == [[0]]
    assert "step_00000006 is damaged" in (folder / "log.txt").read_text() and "resuming from step 4" in said(folder, 0)
    assert_same_to_the_bit(folder, undisturbed)


def test_time_limit(disturb: Fork, tmp_path: Path) -> None:
    assert disturb(tmp_path / "run", {}, flags=("--set", "run.time_limit=0.001")) == [[0]]
    assert json.loads((tmp_path / "run" / "STOPPED").read_text()) == {"step": 1, "reason": "run.time_limit"}


def test_lost_checkpoints_are_no_reason_to_start_again(disturb: Fork, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "split": "train"}\n')
    assert disturb(tmp_path / "run", {}) == [[2]]
    assert "reports step 7, but there is no checkpoint" in said(tmp_path / "run", 0)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_dry_run_leaves_nothing(disturb: Fork, tmp_path: Path, stage: int) -> None:
    flags = ("--dry_run", "--steps", "1000", "--config", f"ds_configs/zero{stage}.json")
    assert disturb(tmp_path / "run", {}, flags=flags) == [[0]]
    assert "stopped by the dry run, checkpoint at step 1" in said(tmp_path / "run", 0)
    assert "resuming from step 1" in said(tmp_path / "run", 0)
    assert re.search(r"dry run: \d+\.\d+ s a step, peak memory .* GB on rank 0; 1,000 steps", said(tmp_path / "run", 0))
    assert {path.name for path in tmp_path.iterdir()} == {"launch_0.txt", "examples.jsonl"}


def test_leaving_without_having_saved_is_no_success(disturb: Fork, tmp_path: Path) -> None:
    """The time limit comes while the disk is full."""
    flags = ("--set", "run.time_limit=0.001")
    assert disturb(tmp_path / "run", {"accident": "full disk", "step": 1}, flags=flags) == [[1]]
    assert "stopped by run.time_limit, but nothing was saved" in said(tmp_path / "run")
    assert not (tmp_path / "run" / "STOPPED").exists()
