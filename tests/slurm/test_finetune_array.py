"""slurm/finetune_array.sbatch in a real SLURM: elements of an array share a grid of real runs, submitted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from multicls.files import read_json
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
GRID = """
tasks: [sst2]
systems: [cls, multicls]  # multicls cannot go on this model
train_sizes: [16]
seeds: [1, 2, 3, 4]
settings: {max_length: 32, train: {max_steps: 2}}
"""


def test_grid_submitted_twice(
    cluster: Cluster, tiny_bert: Path, glue: Path, tmp_path: Path
) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    flags = ["--recipe", "grid.yaml", "--model", f"bert={tiny_bert}", "--data_dir", str(glue)]
    flags += ["--output_dir", str(tmp_path / "results")]

    def submit(*more: str) -> tuple[str, set[str]]:
        """The log of both elements, and their exit codes."""
        job = cluster.submit(
            "finetune_array.sbatch", *flags, *more, cwd=tmp_path, options=("--array=1-2",)
        )
        codes = {cluster.wait(f"{job}_{element}")["ExitCode"] for element in (1, 2)}
        return "".join(
            (tmp_path / f"finetune-{job}_{element}.log").read_text() for element in (1, 2)
        ), codes

    def records() -> dict[str, float]:
        return {
            str(p): read_json(p)["seconds"] for p in (tmp_path / "results").rglob("record.json")
        }

    log, codes = submit()
    assert codes == {"0:0"}, log
    first = records()
    assert len(first) == 4, log
    assert "4 finished, 4 incompatible, of 8 runs" in log and "without facets" in log
    _, codes = submit()
    assert codes == {"0:0"} and records() == first, "a second submission repeats nothing"
    log, codes = submit("--seed", "3")
    assert codes == {"2:0"} and "--seed" in log
