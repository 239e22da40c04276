"""Where there is something to learn, every objective learns it, on documents it has never seen."""

from pathlib import Path

import pytest

from tests.pretrain.conftest import Fork, logs, records

pytestmark = [pytest.mark.launcher, pytest.mark.slow]
LEARNT = [{"mcqt": 0.9}, {"so": 0.8}, {"mlm": 0.9, "tfidf": 0.5}]  # largest share that is left


@pytest.mark.parametrize("shares", LEARNT)
def test_every_loss_falls(fork: Fork, tmp_path: Path, shares: dict[str, float]) -> None:
    flags = ["--steps", "150", "--train.negatives_group", "8"]
    flags += ["--global_batch_size", "16", "--micro_batch_size", "auto"]
    for other in {"mlm", "tfidf", "so", "mcqt"} - shares.keys():
        flags += [f"--objective.{other}", "0"]
    for name in ("log_every", "eval_every", "save_every"):
        flags += [f"--run.{name}", "150"]
    assert fork(tmp_path / "run", flags=tuple(flags)) == [[0]], logs(tmp_path / "run")
    first, last = records(tmp_path / "run", "validation")
    for objective, share in shares.items():
        assert last[f"loss/{objective}"] < share * first[f"loss/{objective}"], (first, last)
