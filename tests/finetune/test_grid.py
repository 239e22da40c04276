"""Grids: the runs and their order, states and exit codes, several processes in one folder, kills."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

from finetune import grid
from finetune.grid import GridSettings, expand, main
from finetune.report import build_report
from finetune.results import load_results, read_predictions, run_state
from finetune.run import _load_task as load_tasks_cache
from finetune.settings import RunSettings
from multicls.errors import UserError
from multicls.files import REPOSITORY, lock_holder, locked, write_json
from multicls.settings import load_settings, parse
from tests.processes import until

GRID: dict[str, Any] = {
    "model": ["bert=MODEL"],
    "tasks": ["sst2"],
    "systems": ["cls"],
    "train_sizes": [16],
    "seeds": [1, 2],
    "settings": {"max_length": 32, "train": {"max_steps": 2, "learning_rate": 1e-3}},
}


def recipe(folder: Path, **changes: Any) -> str:
    (folder / "grid.yaml").write_text(yaml.safe_dump(GRID | changes), encoding="utf-8")
    return str(folder / "grid.yaml")


def runs_of(folder: Path, **changes: Any) -> list[RunSettings]:
    return expand(load_settings(GridSettings, [recipe(folder, **changes)]))


def test_runs_in_the_order_of_the_axes(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, tasks=["rte", "cola"], train_sizes=[100, "1k"], seeds=[1, 2, 3])
    keys = [(run.task, run.train_size, run.seed) for run in runs]
    assert keys == [(t, n, s) for t in ("rte", "cola") for n in (100, 1000) for s in (1, 2, 3)]
    assert runs[0].folder == Path("results/bert-cls/rte-100/p1-d1-s1")


THREE = ["k5=A", "k5=B", "one=C"]
A_AND_B = [("A", 1, 1), ("A", 1, 2), ("B", 2, 3), ("B", 2, 4)]
ONE_EACH = [("A", 1, 1), ("B", 2, 1), ("C", 1, 1)]
C = [("C", 1, 1), ("C", 1, 2), ("C", 2, 3), ("C", 2, 4)]


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (["a=A"], {"subsets": 3}, [("A", 1, 1), ("A", 1, 2), ("A", 1, 3)]),
        (["a=A", "a=B"], {}, [("A", 1, 1), ("B", 2, 2)]),
        (THREE, {"subsets": 2}, [*A_AND_B, *C]),
        (THREE, {"share_subsets": True}, ONE_EACH),
        (THREE, {"train_sizes": ["full"], "subsets": 2}, ONE_EACH),
    ],
)
def test_replicates_have_their_own_subsets(
    model: list[str], changes: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    runs = runs_of(tmp_path, model=model, seeds=[1], **changes)
    found = [(run.model, run.pretraining, run.subset) for run in runs]
    assert found == expected


def test_heads_read_only_their_own_settings(tmp_path: Path) -> None:
    """IsoBN alone takes part in a search of its beta, and cln alone in joint tasks."""
    search = {"train.learning_rate": [1e-5, 1e-3], "isobn.beta": [0.25, 0.5]}
    axes = {"tasks": ["sst5", "sst5,sts"], "seeds": [1], "model": ["a=A", "b=B"]}
    systems = ["cls", "cln", "isobn"]
    runs = runs_of(tmp_path, systems=systems, search=search, **axes)
    counts = Counter((run.task, run.head) for run in runs)
    joint = counts.pop(("sst5,sts", "cln"))
    expected = {"cls": 4, "cln": 4, "isobn": 8}
    assert joint == 4 and counts == {("sst5", head): n for head, n in expected.items()}
    folders = {run.folder.name for run in runs if run.head == "isobn"}
    assert "p1-d1-s1-beta=0.25-learning_rate=1e-05" in folders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["rt"]}, "task rt: no such task. Did you mean 'rte'"),
        ({"systems": ["multcls"]}, "no such head. Did you mean 'multicls'"),
        ({"model": []}, "systems.cls: it needs a model: set --model NAME=FOLDER"),
        ({"model": ["bert"]}, "model = bert: it must be: NAME=FOLDER"),
        ({"train_sizes": ["8-shots"]}, "it must be: 100, 1k, 8-shot"),
        ({"model": ["a=A", "a=B", "b=C", "b=D", "b=E"]}, "each name needs as many"),
        ({"systems": {"x": {"head": "cls", "models": ["brt"]}}}, "Did you mean 'bert'"),
        ({"tasks": ["sst2,stsb"]}, "for several tasks with head cln"),
        ({"search": {"train.learning_rate": 1e-5}}, "valid list"),
        ({"systems": {"x": {"head": "cls", "pooling": "mean"}}}, "cls does not read it"),
        ({"seeds": [1, 1]}, "2 runs have this folder"),
        ({"tasks": []}, "set --tasks, or name a --recipe"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        runs_of(tmp_path, **changes)


def start(folder: Path, model: Path, glue: Path | None, *more: str, **changes: Any) -> list[str]:
    flags = ["--recipe", recipe(folder, **changes | {"model": [f"bert={model}"]})]
    flags += ["--output_dir", str(folder / "results")]
    return [*flags, *([] if glue is None else ["--data_dir", str(glue)]), *more]


def test_states_and_exit_codes(
    tiny_bert: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads that do not fit are no failure; missing data is, and a run that is left out, too."""
    flags = start(tmp_path, tiny_bert, glue, systems=["cls", "multicls"])
    assert main(flags) == 0
    assert "2 finished, 2 incompatible, of 4 runs" in capsys.readouterr().out
    before, dev = records(tmp_path), outputs(tmp_path)
    assert main(flags) == 0 and records(tmp_path) == before, "nothing to do"
    assert main([*flags, "--save_model"]) == 0, "done again, with the same numbers"
    assert records(tmp_path) != before and len(list(tmp_path.rglob("model.safetensors"))) == 2
    np.testing.assert_array_equal(outputs(tmp_path), dev)
    capsys.readouterr()
    assert main(start(tmp_path, tiny_bert, glue, tasks=["sst2", "rte"])) == 1
    out = capsys.readouterr().out
    assert "2 finished, 2 failed" in out and "failed: " in out and "RTE/train.tsv" in out
    assert main(start(tmp_path, tiny_bert, glue, systems=["multicls"])) == 1, "nothing finished"
    capsys.readouterr()
    same = {"train_sizes": [5000], "subsets": 2, "seeds": [1]}  # all rows, twice
    assert main(start(tmp_path, tiny_bert, glue, **same)) == 0
    sizes = sorted(run["train_size"] for run in load_results(tmp_path / "results"))
    assert sizes == ["16", "16", "5000"], "subsets of all rows are one"
    capsys.readouterr()
    with mock.patch.object(grid, "work"):  # as if its processes were killed
        assert main(start(tmp_path, tiny_bert, glue, seeds=[1, 7])) == 1
    assert "1 finished, 1 missing, of 2 runs\nmissing: " in capsys.readouterr().out


def test_a_finished_run_of_other_settings_is_refused_also_when_its_data_are_gone(
    tiny_bert: Path, glue: Path, tmp_path: Path
) -> None:
    """Settings that change no number may differ; the other tasks go on without the data of a finished run."""
    data = shutil.copytree(glue, tmp_path / "glue")
    changes: dict[str, Any] = {"tasks": ["sst2", "stsb"], "seeds": [1]}
    assert main(start(tmp_path, tiny_bert, data, seeds=[1])) == 0
    before = records(tmp_path)
    shutil.rmtree(data / "SST-2")
    load_tasks_cache.cache_clear()
    more = ["--checkpoint_minutes", "1"]
    assert main(start(tmp_path, tiny_bert, data, *more, **changes)) == 0
    assert before.items() < records(tmp_path).items() and len(records(tmp_path)) == 2
    with pytest.raises(UserError, match=r"another run \(train.max_steps 2, not 3\); set another"):
        main(start(tmp_path, tiny_bert, data, "--max_steps", "3", **changes))


def test_failed_runs_are_tried_again(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """Not by the same command; their errors stay until then: another element of an array reads them, too."""
    flags = start(tmp_path, tiny_bert, glue, systems=["cls", "multicls"], seeds=[1])
    with mock.patch("finetune.training.TaskTrainer.run", side_effect=UserError("out of memory")):
        assert main(flags) == 1
    errors = {path.parents[2].name: path for path in tmp_path.rglob("error.json")}
    assert sorted(errors) == ["bert-cls", "bert-multicls"]
    run = next(run for run in runs_of(tmp_path, model=[f"bert={tiny_bert}"]) if run.seed == 1)
    run = run.model_copy(update={"output_dir": str(tmp_path / "results")})
    with mock.patch.object(grid, "run_finetune", side_effect=KeyboardInterrupt):
        assert grid.attempt(run, began=1.0), "failed since the command began"
        with pytest.raises(KeyboardInterrupt):
            main(flags)
    assert all(path.exists() for path in errors.values())
    assert main(flags) == 0 and not errors["bert-cls"].exists()


def test_an_old_error_of_a_run_at_work_is_not_its_state(tmp_path: Path) -> None:
    """Nor is one beside a record that came later."""
    run = tmp_path / "a" / "rte-100" / "p1-d1-s1"
    run.mkdir(parents=True)
    write_json(run / "error.json", {"kind": "failed", "error": "of an earlier start"})
    assert run_state(run) == ("failed", "of an earlier start")
    with locked(run):
        assert run_state(run)[0] == "at work"
    os.utime(run / "error.json", (1, 1))
    write_json(run / "record.json", {})
    assert run_state(run) == ("finished", "")


def test_elements_of_an_array_leave_when_nothing_is_left_to_start(
    tiny_bert: Path,
    glue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The longest run is started first; one that another process makes is no failure."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    held, order = runs_of(tmp_path, model=[f"bert={tiny_bert}"], train_sizes=[16], seeds=[1]), []
    flags = start(tmp_path, tiny_bert, glue, train_sizes=[16, 40], seeds=[1])
    folder = tmp_path / "results" / held[0].folder.relative_to("results")
    make = grid.run_finetune

    def ordered(run: RunSettings) -> Any:
        order.append(run)
        return make(run)

    monkeypatch.setattr(grid, "run_finetune", ordered)
    with locked(folder):
        assert main(flags) == 0
    assert [run.train_size for run in order] == [40]
    assert "1 finished, 1 at work, of 2 runs" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "results")
    assert main(flags) == 0 and [run.train_size for run in order] == [40, 40, 16]


@pytest.mark.parametrize(
    "words",
    [["isobn", "cln"], ["isobn,cln"], ['["isobn", "cln"]'], ['{"isobn": {"head": "isobn"}}']],
)
def test_systems_as_the_help_says(words: list[str]) -> None:
    flags = ["--tasks", "rte", "--model", "m=M", "--pooling", "mean", "--systems", *words]
    settings = parse(GridSettings, flags, prog="grid.py", shortcuts=grid.SHORTCUTS)
    runs = expand(settings)
    assert [run.head for run in runs] == ["isobn", "cln"][: len(runs)]
    assert (runs[0].pooling, runs[0].system) == ("mean", "m-isobn")


@pytest.mark.parametrize("words", [["mean", "facets"], ["mean,facets"]])
def test_names_choose_among_the_systems_of_a_recipe(words: list[str]) -> None:
    flags = ["--recipe", "heads_100", "--tasks", "rte", "--model", "m=M", "--systems", *words]
    options: Any = {"prog": "grid.py", "shortcuts": grid.SHORTCUTS, "recipes": "finetune/recipes"}
    settings = parse(GridSettings, [*flags, "--seeds", "1"], **options)
    runs = [(run.system, run.head) for run in expand(settings)]
    assert runs == [("m-mean", "mean"), ("m-facets", "facets")]


KILLS = int(os.environ.get("MULTICLS_KILLS", "2"))  # more take minutes


def begin(flags: list[str], **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(REPOSITORY / "finetune" / "grid.py"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True)


def records(folder: Path) -> dict[Path, int]:
    """Returns the records of all finished runs in a folder, with the time of each."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("record.json")}


def outputs(folder: Path) -> Any:
    """Returns the outputs of all finished runs in a folder on dev, (runs, N, C)."""
    runs = sorted(path.parent for path in folder.rglob("record.json"))
    return np.stack([np.stack(read_predictions(run, "sst2")["outputs"]) for run in runs])


@pytest.mark.slow
def test_kills_lose_no_run_and_alter_no_number(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """One of two commands is killed at a time, at random moments, and started again; then they finish the rest."""
    draw, many = random.Random(KILLS), KILLS > 9
    train = {"max_steps": 200 if many else 30, "eval_every": 10, "checkpoint_minutes": 1e-3}
    changes: dict[str, Any] = {
        "seeds": list(range(1, 21 if many else 6)),
        "settings": {"max_length": 32, "train": train | {"learning_rate": 1e-3}},
    }
    calm, rough = (tmp_path / name for name in ("calm", "rough"))
    calm.mkdir()
    rough.mkdir()
    flags = start(rough, tiny_bert, glue, **changes)
    commands, finished = [begin(flags), begin(flags)], dict[Path, int]()
    for number in range(KILLS):
        until(partial(at_work, commands[0], rough))
        time.sleep(draw.uniform(0, 3 if many else 0.5))
        commands[number % 2].kill()
        commands[number % 2].wait()
        commands[number % 2] = begin(flags)
        before, finished = finished, records(rough)
        assert before.items() <= finished.items(), "a finished run was done again"
    assert main(start(calm, tiny_bert, glue, **changes)) == 0
    assert [command.wait() for command in commands] == [0, 0]
    np.testing.assert_allclose(outputs(rough), outputs(calm), atol=1e-6)  # other threads
    tables = [build_report(path / "results").table for path in (calm, rough)]
    assert tables[0] == tables[1]


def at_work(command: subprocess.Popen[bytes], folder: Path) -> bool:
    """Returns True if a process works on a run or the command has ended."""
    locks = folder.rglob(".lock")
    return command.poll() is not None or any(lock_holder(path.parent) for path in locks)
