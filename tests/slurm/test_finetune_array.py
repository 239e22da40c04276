"""slurm/finetune_array.sbatch in a real SLURM: elements of an array share a grid of real runs."""

from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
GRID = """
tasks: [sst2]
systems: [cls, multicls]  # multicls cannot go on this model
train_sizes: [16]
seeds: [1, 2, 3, 4]
settings: {max_length: 32, train: {max_steps: 2}}
"""


def test_array_shares_a_grid(cluster: Cluster, tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    flags = ["--recipe", "grid.yaml", "--model", f"bert={tiny_bert}", "--data_dir", str(glue)]
    flags += ["--output_dir", str(tmp_path / "results")]
    job = cluster.submit("finetune_array.sbatch", *flags, cwd=tmp_path, options=("--array=1-2",))
    codes = {cluster.wait(f"{job}_{element}")["ExitCode"] for element in (1, 2)}
    logs = [(tmp_path / f"finetune-{job}_{element}.log").read_text() for element in (1, 2)]
    assert codes == {"0:0"} and len(list((tmp_path / "results").rglob("record.json"))) == 4, logs
    assert "4 finished, 4 incompatible, of 8 runs" in "".join(logs) and "without facets" in logs[0]
