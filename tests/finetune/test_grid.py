"""Grids: the cells and their order, finished ones skipped, crashed ones recorded, many processes in one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import run as run_module
from finetune.grid import GridSettings, expand, main
from finetune.store.results import Store
from multicls.errors import UserError
from multicls.files import REPOSITORY, read_jsonl
from multicls.settings import load_settings
from tests.processes import until

GRID: dict[str, Any] = {
    "models": {"bert": "MODEL"}, "tasks": ["sst2"], "systems": ["cls"], "train_sizes": [16], "seeds": [1, 2],
    "settings": {"max_length": 32, "train": {"max_steps": 2, "learning_rate": 1e-3}},
}  # fmt: skip


def recipe(folder: Path, **changes: Any) -> str:
    (folder / "grid.yaml").write_text(yaml.safe_dump(GRID | changes), encoding="utf-8")
    return str(folder / "grid.yaml")


def cells(folder: Path, **changes: Any) -> list[Any]:
    return expand(load_settings(GridSettings, [recipe(folder, **changes)]), "results")


def test_cells_in_the_order_of_the_axes(tmp_path: Path) -> None:
    found = cells(tmp_path, tasks=["rte", "cola"], train_sizes=[100, "1k"], seeds=[1, 2, 3])
    keys = [(cell.settings.task, cell.settings.train_size, cell.settings.seed) for cell in found]
    assert keys == [(t, n, s) for t in ("rte", "cola") for n in (100, 1000) for s in (1, 2, 3)]
    assert len({cell.title for cell in found}) == 12


def test_pretraining_seeds_pooling_and_overrides(tmp_path: Path) -> None:
    found = cells(tmp_path, models={"k5": ["A", "B"], "one": "C"}, systems=["cls", "isobn/multicls"], seeds=[1],
                  overrides={"isobn/multicls": {"isobn": {"beta": 1.0}}, "16": {"train": {"epochs": 3}}})  # fmt: skip
    names = [(cell.settings.model_name, cell.settings.pretraining_seed, cell.settings.model) for cell in found[:3]]
    assert names == [("k5", 1, "A"), ("k5", 2, "B"), ("one", None, "C")]
    assert [cell.settings.label for cell in found] == ["cls"] * 3 + ["isobn/multicls"] * 3
    assert [cell.system for cell in found[1:5]] == ["k5 cls", "one cls", "k5 isobn/multicls", "k5 isobn/multicls"]
    last = found[-1].settings
    assert (last.isobn.beta, last.pooling, last.train.epochs, last.train.max_steps) == (1.0, "multicls", 3, 2)
    assert found[0].settings.isobn.beta == 0.5


def test_probe_takes_part_once_and_joint_tasks_are_for_cln(tmp_path: Path) -> None:
    search = {"train.learning_rate": [1e-5, 1e-3]}
    found = cells(tmp_path, systems=["cls", "cln", "probe"], tasks=["sst5", "sst5,sts"], search=search)
    count = [(cell.settings.task, cell.settings.head) for cell in found]
    assert [count.count(("sst5", head)) for head in ("cls", "cln", "probe")] == [4, 4, 2]
    assert [count.count(("sst5,sts", head)) for head in ("cls", "cln", "probe")] == [0, 4, 0]


def test_systems_choose_only_from_settings_that_their_head_reads(tmp_path: Path) -> None:
    search = {"isobn": {"beta": [0.25, 0.5]}, "train": {"batch_size": [4, 8]}, "pooling": ["cls", "multicls"]}
    found = cells(tmp_path, systems=["cls", "isobn"], seeds=[1], search=search)
    assert [cell.candidate for cell in found[:2]] == [{"train.batch_size": 4}, {"train.batch_size": 8}]
    assert len(found) == 2 + 8 and len({(cell.settings.head, str(cell.settings.requested())) for cell in found}) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["rt"]}, "--task rt: no such task. Did you mean 'rte'"),
        ({"systems": ["multcls"]}, "no such head. Did you mean 'multicls'"),
        ({"train_sises": [100]}, "train_sises: no such setting. Did you mean 'train_sizes'"),
        ({"settings": {"train": {"epoch": 3}}}, "settings.train.epoch: no such setting. Did you mean"),
        ({"settings": {"seed": 3}}, "settings.seed: this is an axis"),
        ({"overrides": {"sst": {}}}, "overrides: sst: no task, system or train size of this grid. Did you mean 'sst2'"),
        ({"systems": {"a": {"head": "cls", "models": ["brt"]}}}, "systems.a.models: brt: no model of this grid"),
        ({"search": {"isobn.betta": [1]}}, "betta"),
        ({"models": {}}, "no models: give --model NAME=FOLDER"),
        ({"seeds": []}, "seeds"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        cells(tmp_path, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["quick", "heads_100", "paper_glue", "paper_superglue"])
def test_shipped_recipes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--recipe", f"finetune/recipes/{name}.yaml", "--list"]
    models = 4 if name.startswith("paper") else 1
    names = ["minilm", "k5"] if name == "heads_100" else ["k5"]
    assert main([*flags, *(f"--model={model}=M{seed}" for model in names for seed in range(models))]) == 0
    expected = {
        "quick": 2 * 3 * 3,
        "heads_100": 7 * 12 * (3 + 2),
        "paper_glue": 8 * 3 * 6 * 16,
        "paper_superglue": 7 * 3 * 6 * 16,
    }
    assert len(capsys.readouterr().out.splitlines()) == expected[name]


def test_names_of_models_may_have_dots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, models={"bert-1.0": "A"}, seeds=[1])
    assert main(["--recipe", path, "--model", "k5.1=B", "k5.1=C", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[2].split()[0] for line in listed] == ["bert-1.0", "k5.1", "k5.1"]


def test_a_grid_needs_a_process(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--jobs 0: must be greater than 0"):
        main(["--recipe", recipe(tmp_path), "--jobs", "0"])


def test_list_and_status_need_no_torch(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "model.safetensors"):
        (model / file).write_text("{}")
    path = recipe(tmp_path, models={"bert": str(model)})
    code = (
        "import sys, finetune.grid as grid\n"
        f"for flag in ('--list', '--status'): grid.main(['--recipe', {path!r}, '--output_dir', "
        f"{str(tmp_path / 'results')!r}, flag])\n"
        "assert not {'torch', 'transformers', 'sklearn', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished 0, impossible 0, failed 0, missing 2, of 2"
    assert not (tmp_path / "results").exists()


def test_a_misspelt_file_is_told_once_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,x\n")
    own = {"rows": {"train_file": str(tmp_path / "rosw.csv")}}
    with pytest.raises(UserError, match=r"^.*rosw.csv: no such file. Did you mean 'rows.csv'\?$"):
        main(["--recipe", recipe(tmp_path, tasks=["rows"], own=own), "--output_dir", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()


@pytest.fixture
def flags(tiny_bert: Path, glue: Path, tmp_path: Path) -> list[str]:
    """Flags of a grid of cls and multicls on a BERT without facets."""
    path = recipe(tmp_path, systems=["multicls", "cls"], models={"bert": str(tiny_bert)})
    return ["--recipe", path, "--data_dir", str(glue), "--output_dir", str(tmp_path / "results")]


def test_impossible_cells_are_told_and_finished_ones_skipped(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "runs 4/4  impossible 2" in text and "it has no facets" in text
    results = read_jsonl(tmp_path / "results" / "results.jsonl")
    assert sorted(record["seed"] for record in results) == [1, 2]
    assert main([*flags, "--status"]) == 0
    assert capsys.readouterr().out.startswith("finished 2, impossible 2, failed 0, missing 0, of 4")
    assert main(flags) == 0
    assert read_jsonl(tmp_path / "results" / "results.jsonl") == results
    (plan,) = Store(tmp_path / "results").plans()
    assert [(run["system"], run["seed"]) for run in plan["runs"]] == [
        ("bert multicls", 1), ("bert multicls", 2), ("bert cls", 1), ("bert cls", 2)]  # fmt: skip


def test_crashed_cells_are_recorded_and_tried_again(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, seen = run_module.run, []

    def crashing(settings: Any) -> Any:
        seen.append(settings.seed)
        if settings.seed == 1:
            raise RuntimeError("the device is on fire")
        if settings.seed == 3:
            raise UserError("the loss is not a number")  # in the middle of a run that was possible
        return real(settings)

    monkeypatch.setattr(run_module, "run", crashing)
    assert main([*flags, "--set", "systems=[cls]", "--set", "seeds=[1, 2, 3]"]) == 1
    assert seen == [1, 2, 3] and "RuntimeError: the device is on fire" in capsys.readouterr().out
    line, _ = read_jsonl(tmp_path / "results" / "errors.jsonl")
    assert "crashing" in line["traceback"] and line["title"].endswith("seed 1") and line["run_id"]
    monkeypatch.undo()
    assert main([*flags, "--set", "systems=[cls]", "--set", "seeds=[1, 2, 3]", "--status"]) == 0
    assert "finished 1, impossible 0, failed 2, missing 0, of 3" in capsys.readouterr().out
    assert main([*flags, "--set", "systems=[cls]"]) == 0
    assert [record["seed"] for record in Store(tmp_path / "results").records()] == [2, 1]
    assert main([*flags, "--set", "systems=[cls]", "--status"]) == 0
    assert "finished 2, impossible 0, failed 0, missing 0" in capsys.readouterr().out


def test_other_settings_are_other_cells(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--set", "systems=[cls]"]) == 0
    capsys.readouterr()
    for change, finished in (
        ("settings.train.max_grad_norm=1.0", 2),
        ("settings.train.max_grad_norm=2.0", 0),
        ("seeds=[2, 3]", 1),
    ):
        assert main([*flags, "--set", "systems=[cls]", "--set", change, "--status"]) == 0
        assert capsys.readouterr().out.startswith(f"finished {finished}, ")


@pytest.mark.slow
def test_processes_side_by_side_are_stopped_and_go_on(flags: list[str], tmp_path: Path) -> None:
    sets = ("systems=[cls]", "seeds=[1, 2, 3, 4, 5, 6]", "settings.train.max_steps=40")
    command = [sys.executable, str(REPOSITORY / "finetune" / "grid.py"), *flags, "--jobs", "2"]
    command += [f"--set={value}" for value in sets]
    lines, results = tmp_path / "out.txt", tmp_path / "results" / "results.jsonl"
    with open(lines, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        until(lambda: results.exists() or process.poll() is not None, lines.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGINT, lines.read_text()
    assert "the same command goes on" in lines.read_text()
    before = len(read_jsonl(results))
    assert 1 <= before < 6 and not (tmp_path / "results" / "errors.jsonl").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"runs {before}/6" in done.stdout and "runs 6/6" in done.stdout
    assert sorted(record["seed"] for record in read_jsonl(results)) == [1, 2, 3, 4, 5, 6], "each cell once"


def test_own_rows_in_a_grid(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """A recipe and flags give the same runs."""
    rows = (glue / "SST-2" / "dev.tsv").read_text(encoding="utf-8").replace("sentence\t", "text\t", 1)
    (tmp_path / "reviews.tsv").write_text(rows, encoding="utf-8")
    values = {"models": {"bert": str(tiny_bert)}, "systems": ["cls", "mean"], "seeds": [1]}
    own = {"reviews": {"train_file": str(tmp_path / "reviews.tsv")}}
    first = cells(tmp_path, tasks=["reviews"], own=own, **values)
    flags = ["--recipe", recipe(tmp_path, **values), "--train_file", str(tmp_path / "reviews.tsv")]
    assert main([*flags, "--output_dir", str(tmp_path / "results")]) == 0
    records = Store(tmp_path / "results").records()
    assert [run.request_ids[0] for run in first] == [record["request_id"] for record in records]
    assert {record["task"] for record in records} == {"own_reviews"}
