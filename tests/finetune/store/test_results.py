"""The results folder: many writers, killed writers, other protocols."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from finetune.store import results
from finetune.store.results import Store
from multicls.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def _write_many(folder: Path, writer: int) -> None:
    for number in range(20):
        Store(folder).write({"run_id": f"{writer}-{number}", "filler": "x" * 2000}, {"ids": np.arange(3)})


def test_many_processes_write_one_folder(tmp_path: Path) -> None:
    with get_context("spawn").Pool(4) as pool:
        pool.starmap(_write_many, [(tmp_path, writer) for writer in range(4)])
    found = {record["run_id"] for record in Store(tmp_path).records()}
    assert found == {f"{writer}-{number}" for writer in range(4) for number in range(20)}
    assert json.loads((tmp_path / results.MARKER).read_text(encoding="utf-8")) == {"protocol": results.PROTOCOL}
    assert Store(tmp_path).predictions("2-7")["ids"].tolist() == [0, 1, 2]


def test_a_claim_is_exclusive_and_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from finetune.store.results import Store\n"
        "with Store(sys.argv[1]).claim('a1'): print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(results.Busy, match="run a1 .* another process"), Store(tmp_path).claim("a1"):
            pass
        with Store(tmp_path).claim("b2"):
            pass
        holder.kill()
    with Store(tmp_path).claim("a1"):  # the dead one's lock file is there, its lock is not
        pass
    assert not list((tmp_path / "claims").iterdir())


def _race(folder: Path, inside: Path) -> None:
    """Takes one claim fifty times, as soon as it is free; fails if it is not alone."""
    held = 0
    while held < 50:
        try:
            with Store(folder).claim("c3"):
                inside.touch(exist_ok=False)
                inside.unlink()
                held += 1
        except results.Busy:
            continue


def test_racing_processes_never_hold_one_claim_together(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        pool.starmap(_race, [(tmp_path, tmp_path / "inside")] * 3)
    assert not (tmp_path / "inside").exists()


def test_a_run_without_its_line_is_not_finished_and_the_last_line_counts(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").records() == []
    for score in (0.1, 0.2):
        Store(tmp_path).write({"run_id": "a", "score": score}, {"logits": np.zeros((2, 2))})
    (tmp_path / results.RESULTS).open("a").write('{"run_id": "torn')
    Store(tmp_path).write({"run_id": "b"}, {})
    assert [(r["run_id"], r.get("score")) for r in Store(tmp_path).records()] == [("a", 0.2), ("b", None)]


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="pickled"):
        Store(tmp_path).write({"run_id": "a"}, {"ids": np.array([object()])})
    assert Store(tmp_path).records() == []


@pytest.mark.parametrize(
    ("name", "content"),
    [(results.RESULTS, '{"run_id": "old"}\n'), (results.MARKER, '{"protocol": 9}'), (results.MARKER, "[]")],
)
def test_a_folder_of_another_protocol_is_refused_and_left_alone(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"protocol .*, this is protocol {results.PROTOCOL}.*--output_dir"):
        Store(tmp_path).records()
    with pytest.raises(UserError, match="protocol"), Store(tmp_path).claim("a"):
        pass
    with pytest.raises(UserError, match="protocol"):
        Store(tmp_path).write_error(ValueError("x"), "title")
    assert (tmp_path / name).read_text(encoding="utf-8") == content and not (tmp_path / results.ERRORS).exists()


def test_errors_keep_what_is_needed_to_understand_them(tmp_path: Path) -> None:
    try:
        raise MemoryError("no room")
    except MemoryError as error:
        Store(tmp_path).write_error(error, "rte, 100 rows", "a1", ["r1"])
    (line,) = (tmp_path / results.ERRORS).read_text(encoding="utf-8").splitlines()
    record = json.loads(line)
    assert (record["run_id"], record["title"], record["request_ids"]) == ("a1", "rte, 100 rows", ["r1"])
    assert record["error"] == "MemoryError: no room" and "raise MemoryError" in record["traceback"] and record["time"]
