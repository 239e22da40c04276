"""pretrain/report.py on runs of different lengths, unfinished ones, missing keys and wrong folders."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.files import append_jsonl
from pretrain.report import COLUMNS, main, read_runs, table
from tests.pretrain.conftest import REPOSITORY


def write_run(folder: Path, steps: int, planned: int, facets: int = 2, done: bool = True) -> Path:
    for step in range(steps + 1):
        values: dict[str, float] = {f"loss/{name}": 9.0 / (step + 1) for name in ("total", "mlm", "tfidf", "mcqt")}
        values |= {f"facets/variance_{k}": 0.25 * k for k in range(1, facets + 1)}
        values |= {"facets/mean_cosine": 0.125} if facets > 1 else {}
        if step % 4 == 0:
            append_jsonl(folder / "metrics.jsonl", {"step": step, "split": "validation", **values, "acc/mcqt": 0.5})
        if step:
            speed = {"speed/seconds_per_step": 9.0 if step == 1 else 0.25, "data/tokens": 1000.0, "optim/lr": 1e-5}
            append_jsonl(folder / "metrics.jsonl", {"step": step, "split": "train", **values, **speed})
    (folder / "settings.yaml").write_text(f"train:\n  steps: {planned}\n")
    if done:
        (folder / "DONE").touch()
    return folder


def cells(text: str) -> dict[str, dict[str, str]]:
    heading, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}


def test_table_of_unlike_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "base", 8, 8), write_run(tmp_path / "k1", 5, 8, facets=1, done=False)]
    found = cells(table(read_runs([str(run) for run in runs])))
    assert found["base"]["steps"] == "8" and found["k1"]["steps"] == "5 of 8"
    assert found["base"]["loss"] == "1.000" and found["k1"]["loss"] == "1.800"  # at steps 8 and 4
    assert found["base"]["facet cosine"] == "0.125" and found["k1"]["facet cosine"] == "-"
    assert found["base"]["facet variance"] == "0.2500"  # of the least varying facet
    assert found["base"]["SO"] == "-" and found["base"]["MCQT acc"] == "0.500"
    assert found["base"]["ms a step"] == "250"  # the slow first step does not count
    assert found["base"]["tokens"] == "8k" and found["k1"]["tokens"] == "5k"


def test_table_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, steps, 300, done=False) for name, steps in (("a$b", 300), ("b", 0))]
    append_jsonl(runs[0] / "metrics.jsonl", {"step": 301, "split": "train", "loss/total": float("nan")})
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 302, "spl')  # torn by a kill
    markdown = tmp_path / "out" / "report.md"
    main([*map(str, runs), "--markdown", str(markdown)])
    printed = capsys.readouterr().out
    assert re.search(r"run +a\$b +b *\n", printed) and re.search(r"steps +301 of 300 +0 of 300", printed)
    assert all(len(line) <= 120 for line in printed.splitlines()[:-2])
    assert set(cells(markdown.read_text())) == {"a$b", "b"}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / seed / "base", 1, 1)) for seed in ("1", "2")]
    assert [run["run"] for run in read_runs([*runs, runs[0]])] == runs
    assert [run["run"] for run in read_runs([runs[0] + "/"])] == ["base"]


def test_wrong_folders_name_the_nearest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (write_run(tmp_path / "runs" / "base", 1, 1) / "hf").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    with pytest.raises(UserError) as caught:
        read_runs(["runs/bas", "runs", "runs/base/hf", "basis", "runs/base"])
    assert [problem.partition(").")[2] for problem in caught.value.problems] == [
        " Did you mean 'runs/base'?",
        " Runs in it: base.",
        " Did you mean 'runs/base'?",
        " Known: new, runs/base.",
    ]
    with pytest.raises(UserError, match="nothing measured yet"):
        read_runs(["new"])


def test_help_is_quick_and_mistakes_have_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "pretrain/report.py")]
    imported = "import sys, runpy; sys.argv = ['report.py', '--help']\ntry: runpy.run_path(%r, run_name='__main__')\n"
    imported += "except SystemExit: print({'torch', 'matplotlib'} & set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", imported % command[1]], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert shown.stdout.endswith("set()\n")
    wrong = subprocess.run([*command, "nowhere"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "nowhere: no run there" in wrong.stderr


def test_keys_of_report_and_page_are_keys_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that training writes under another name would silently be left out; every key is explained."""
    from pretrain.flops import throughput
    from pretrain.metrics import means
    from pretrain.training import StepTimer
    from tests.pretrain.test_metrics import micro_batch, model, totals_of

    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    network = model(2)
    totals = totals_of(network, [micro_batch(0, 2, 3)])
    written = means(totals).keys() | throughput(network.config, totals, 1.0, 1.0).keys()
    written |= StepTimer().metrics(1.0).keys() | {"loss/total", "optim/lr", "optim/grad_norm", "memory/peak_gb"}
    written |= {"optim/loss_scale"}
    assert {key for key, _ in COLUMNS.values()} <= written | {"least facets/variance"}
    page = (REPOSITORY / "docs" / "pretraining.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    explained = {key for row in rows for key in re.findall("`([a-z]+[0-9]?/[a-z0-9_]+)`", row)}
    assert explained == {re.sub(r"variance_\d", "variance_k", key) for key in written}
