"""slurm/finetune_array.sbatch in a real SLURM: a grid of real fine-tuning runs, submitted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from multicls.files import read_jsonl
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
GRID = "--head cls --seed 1\n--head cls --seed 2 --learning_rate 1e-4\n--head none --seed 1\n"


def test_grid_submitted_twice(cluster: Cluster, tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.txt").write_text(GRID)
    flags = ["--model", str(tiny_bert), "--task", "sst2", "--data_dir", str(glue), "--train_size", "16"]
    flags += ["--max_length", "32", "--max_steps", "2", "--output_dir", str(tmp_path / "results")]

    def submit() -> str:
        """The log of all four elements; the third's head and the fourth's line do not exist."""
        job = cluster.submit("finetune_array.sbatch", "grid.txt", *flags, cwd=tmp_path, options=("--array=1-4",))
        ends = [cluster.wait(f"{job}_{element}") for element in range(1, 5)]
        log = "".join((tmp_path / f"finetune-{job}_{element}.log").read_text() for element in range(1, 5))
        assert [end["ExitCode"] for end in ends] == ["0:0", "0:0", "2:0", "2:0"], log
        return log

    log = submit()
    results = read_jsonl(tmp_path / "results" / "results.jsonl")
    assert sorted(record["identity"]["seed"] for record in results) == [1, 2]
    assert "--head none: no such head" in log and "give --array=1-3" in log
    assert submit().count("already finished") == 2
    assert read_jsonl(tmp_path / "results" / "results.jsonl") == results
