"""slurm/finetune_array.sbatch in a real SLURM: elements of an array share a grid of real runs, submitted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from multicls.files import read_jsonl
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
GRID = """
tasks: [sst2]
systems: [cls, multicls]  # multicls cannot go on this model
train_sizes: [16]
seeds: [1, 2, 3, 4]
settings: {max_length: 32, train: {max_steps: 2}}
"""


def test_grid_submitted_twice(cluster: Cluster, tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    flags = ["--recipe", "grid.yaml", "--model", f"bert={tiny_bert}", "--data_dir", str(glue)]
    flags += ["--output_dir", str(tmp_path / "results")]

    def submit(*more: str) -> tuple[str, set[str]]:
        """The log of both elements, and their exit codes."""
        job = cluster.submit("finetune_array.sbatch", *flags, *more, cwd=tmp_path, options=("--array=1-2",))
        codes = {cluster.wait(f"{job}_{element}")["ExitCode"] for element in (1, 2)}
        return "".join((tmp_path / f"finetune-{job}_{element}.log").read_text() for element in (1, 2)), codes

    log, codes = submit()
    assert codes == {"0:0"}, log
    results = read_jsonl(tmp_path / "results" / "results.jsonl")
    assert sorted(record["seed"] for record in results) == [1, 2, 3, 4], log
    assert "runs 8/8  impossible 4" in log and "it has no facets" in log
    _, codes = submit()
    assert codes == {"0:0"} and read_jsonl(tmp_path / "results" / "results.jsonl") == results
    log, codes = submit("--set", "seed=3")
    assert codes == {"2:0"} and "seed: no such setting" in log
