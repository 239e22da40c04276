"""Giving the same command again: after accidents, after changes, and beside tasks that still run."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tokenizers import Tokenizer

from data_prep import build, engine, merge, units
from data_prep import prepare as prepare_module
from data_prep.engine import TasksFailed, check_no_jobs
from data_prep.prepare import prepare, sentences_of
from data_prep.settings import ExecutorOptions, PrepareSettings
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import read_json
from tests.data_prep.conftest import same_files, story


def prepared(tokenizer: Path, output: Path, *inputs: Path | str, kind: str = "local", **settings: Any) -> Corpus:
    given = PrepareSettings(input=tuple(map(str, inputs)), tokenizer=str(tokenizer), **settings)
    return Corpus.open(
        prepare(given, output, ExecutorOptions(executor=kind, workers=1, partition="all"), log=lambda _: None)
    )


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files of a unit each; the last repeats the first."""
    monkeypatch.setattr(units, "SMALLEST_UNIT", 900)
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(story(20 + i % 11, i % 11))
    return folder


def stop_at(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts the next start in a stage: at the third part, or at its first task."""
    module, name, calls = {
        "build": (build, "write_shard", 3),
        "duplicates": (merge, "repeated_lines", 1),
        "shards": (merge, "_link", 3),
        "manifest": (prepare_module, "write_manifest", 1),
    }[stage]
    original, left = getattr(module, name), [calls]

    def stopping(*content: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(*content)

    monkeypatch.setattr(module, name, stopping)


SLOW = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("duplicates", "shards")]


@pytest.mark.parametrize("stage", ["build", *SLOW, "manifest"])
def test_input_may_grow_between_two_starts(
    stage: str, texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(stage, patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    (texts / "05b.txt").write_text(story(40, 5))
    (texts / "11.txt").unlink()
    prepared(tiny_tokenizer, tmp_path / "out", texts).verify()
    prepared(tiny_tokenizer, tmp_path / "fresh", texts)
    same_files(tmp_path / "fresh", tmp_path / "out")


@pytest.mark.parametrize("stage", ["build", "shards"])
def test_the_output_may_lie_in_the_input(
    stage: str, texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tiny_tokenizer, tmp_path / "whole", texts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(stage, patch)
        prepared(tiny_tokenizer, texts / "out", texts)
    prepared(tiny_tokenizer, texts / "out", texts)
    same_files(tmp_path / "whole", texts / "out")
    prepared(tiny_tokenizer, texts / "out", texts)  # is finished
    with pytest.raises(UserError, match="is no corpus, and all of the input lies in it"):
        prepared(tiny_tokenizer, texts, texts)


def test_a_work_folder_that_outlived_the_manifest_is_removed(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = prepare_module.write_manifest

    def stopping(*content: Any) -> None:
        original(*content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "write_manifest", stopping)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    assert (tmp_path / "out" / "work" / "parts").exists()
    prepared(tiny_tokenizer, tmp_path / "out", texts).verify()
    assert not (tmp_path / "out" / "work").exists()


def test_file_systems_without_hard_links(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tiny_tokenizer, tmp_path / "whole", texts)

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(merge.os, "link", refused)
    prepared(tiny_tokenizer, tmp_path / "out", texts)
    same_files(tmp_path / "whole", tmp_path / "out")


def test_a_late_task_takes_nothing_from_a_finished_corpus(tmp_path: Path) -> None:
    (tmp_path / "shard").write_text("whole")
    with pytest.raises(FileNotFoundError):
        merge._link(tmp_path / "work" / "rows-0.arrow", tmp_path / "shard")
    assert (tmp_path / "shard").read_text() == "whole"


def test_two_tasks_may_build_one_part_at_once(tmp_path: Path) -> None:
    with build._new_folder(tmp_path / "part") as one:
        (one / "a").write_text("1")
        with build._new_folder(tmp_path / "part") as other:
            (other / "a").write_text("2")
        (one / "b").write_text("1")
    assert (tmp_path / "part" / "a").read_text() == "2" and list(tmp_path.iterdir()) == [tmp_path / "part"]


def test_a_part_that_is_gone_is_built_again(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tiny_tokenizer, tmp_path / "whole", texts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at("duplicates", patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    part = next((tmp_path / "out" / "work" / "parts").iterdir())
    part.rename(tmp_path / "elsewhere")
    prepared(tiny_tokenizer, tmp_path / "out", texts)
    same_files(tmp_path / "whole", tmp_path / "out")


def test_added_tokens_make_other_parts(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at("build", patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    tokenizer.add_tokens(["catsat"])
    (tmp_path / "more").mkdir()
    tokenizer.save(str(tmp_path / "more" / "tokenizer.json"))
    corpus = prepared(tmp_path / "more", tmp_path / "out", texts)
    assert len(corpus.document_frequency) == tokenizer.get_vocab_size()
    prepared(tmp_path / "more", tmp_path / "fresh", texts)
    same_files(tmp_path / "fresh", tmp_path / "out")


def test_stricter_records_look_at_every_record(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (texts / "00.jsonl").write_text(json.dumps({"text": story(9)}) + "\n{torn\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at("shards", patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    with pytest.raises(UserError, match="00.jsonl:2: not JSON"):
        prepared(tiny_tokenizer, tmp_path / "out", texts, bad_records="stop")
    assert prepared(tiny_tokenizer, tmp_path / "out", texts).manifest["dropped"]["records_not_json"] == 1


def test_other_settings_are_named(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at("shards", patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    with pytest.raises(UserError, match=r"unfinished corpus of other settings \(min_sentences\)"):
        prepared(tiny_tokenizer, tmp_path / "out", texts, min_sentences=7)


def test_an_unfinished_corpus_of_another_version_is_told(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at("shards", patch)
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    path = tmp_path / "out" / "work" / "plan.json"
    plan = read_json(path)
    plan["settings"]["read_options"] = {"documents": plan["settings"].pop("documents")}
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match=r"out: holds an unfinished corpus of another version.*give another --output"):
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    assert (tmp_path / "out" / "work" / "parts").exists()


def test_a_remote_file_that_changed_is_told(tiny_tokenizer: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/in.txt", story(9).encode())
    prepared(tiny_tokenizer, tmp_path / "out", "memory://corpus/in.txt")
    prepared(tiny_tokenizer, tmp_path / "out", "memory://corpus/in.txt")
    memory.pipe("/corpus/in.txt", story(9).replace("cat", "mat").encode())
    with pytest.raises(UserError, match="has changed since"):
        prepared(tiny_tokenizer, tmp_path / "out", "memory://corpus/in.txt")


def test_a_file_that_cannot_be_cut_gives_several_shards(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CHUNK_CHARACTERS", 2000)
    documents = [story(30 + i % 17, i % 17) for i in range(60)]
    documents[3] = documents[40] = story(50, 20)
    data = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(data.encode(), mtime=0))
    one = prepared(tiny_tokenizer, tmp_path / "one", tmp_path / "in.jsonl.gz")
    monkeypatch.setattr(build, "SHARD_TOKENS", 900)
    many = prepared(tiny_tokenizer, tmp_path / "many", tmp_path / "in.jsonl.gz")
    many.verify()
    assert one.num_shards == 1 and many.num_shards > 3
    assert many.num_documents == one.num_documents < 60 and many.manifest["dropped"] == one.manifest["dropped"]
    assert [many.row(i).tokens.tolist() for i in range(many.num_rows)] == [
        one.row(i).tokens.tolist() for i in range(one.num_rows)
    ]
    assert (many.document_frequency == one.document_frequency).all()


def test_paths_in_the_plan_are_absolute(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stop_at("duplicates", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepared(tiny_tokenizer, Path("out"), "in")
    files = read_json(tmp_path / "out" / "work" / "plan.json")["files"]
    assert [file["path"] for file in files] == [str(path) for path in sorted(texts.iterdir())]


def test_names_that_are_not_utf8(tiny_tokenizer: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system takes no such names")
    (folder / os.fsdecode(b"a\xff.txt")).write_text(story(9))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", folder)
    assert (corpus.row(0).source, corpus.row(0).id) == ("in\\xff", "a\\xff.txt#0")


def test_a_vocabulary_reads_all_of_a_compressed_text(tmp_path: Path) -> None:
    text = " ".join(f"The cat sat on mat number {i}." for i in range(500))
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress("\n\n".join([text] * 9).encode()))
    settings = PrepareSettings(input=(str(tmp_path / "in.txt.gz"),), tokenizer="", documents="blank_line")
    assert len(list(sentences_of(settings, 10))) == 4500
    assert 500 <= len(list(sentences_of(settings, 0.02))) <= 1000


# A SLURM of shell scripts: `squeue` answers what a file holds


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "sbatch": "echo Submitted batch job 7",
        "scancel": f"echo $@ >> {tmp_path}/cancelled",
        "squeue": f"cat {tmp_path}/queue; if [ -s {tmp_path}/problem ]; then cat {tmp_path}/problem >&2; exit 1; fi",
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    for name in ("queue", "problem", "cancelled"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(engine, "PATIENCE", 0.05)
    return tmp_path


@pytest.mark.parametrize(
    "queue, problem, alive",
    [
        ("RUNNING None\n", "", True),
        ("PENDING DependencyNeverSatisfied\n", "", False),
        ("", "", False),
        ("", "slurm_load_jobs error: Invalid job id specified", False),
        ("", "slurm_load_jobs error: Unable to contact slurm controller", True),
    ],
)
def test_jobs_are_alive_unless_slurm_says_otherwise(fake_slurm: Path, queue: str, problem: str, alive: bool) -> None:
    (fake_slurm / "queue").write_text(queue)
    (fake_slurm / "problem").write_text(problem)
    assert engine._alive(["7"]) is alive and not engine._alive([])


def test_failed_tasks_of_slurm_keep_their_logs(fake_slurm: Path, texts: Path, tiny_tokenizer: Path) -> None:
    output = fake_slurm / "out"
    logs = output / "work" / "logs" / "build"

    def submit_and_fail(*_: Any) -> dict[str, str]:
        (logs / "logs").mkdir(parents=True)
        (logs / "logs" / "task_00000.log").write_text("Traceback:\nmulticls.errors.UserError: in.txt: is odd\n")
        return {"build": "7"}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TasksFailed, match="Task 0: UserError: in.txt: is odd"):
        patch.setattr(engine, "_submit", submit_and_fail)
        prepared(tiny_tokenizer, output, texts, kind="slurm")
    assert logs.exists() and (fake_slurm / "cancelled").read_text() == "7\n"


def test_files_may_appear_after_a_slow_answer_of_slurm(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completions = fake_slurm / "logs" / "one" / "completions"
    looks = 0

    def ended(_: Any) -> bool:
        nonlocal looks
        looks += 1
        time.sleep(2 * engine.PATIENCE)
        if looks == 3:  # one before the jobs are submitted
            completions.mkdir(parents=True)
            (completions / "00000").touch()
        return False

    monkeypatch.setattr(engine, "_submit", lambda *_: {"one": "7"})
    monkeypatch.setattr(engine, "_alive", ended)
    options = ExecutorOptions(executor="slurm", workers=1, partition="all")
    engine.run_stages([engine.Stage("one", [], [1])], fake_slurm, options, lambda _: None)
    assert looks == 3


def test_jobs_of_an_earlier_start_are_waited_for(fake_slurm: Path, texts: Path, tiny_tokenizer: Path) -> None:
    output = fake_slurm / "out"
    with pytest.raises(TasksFailed):
        prepared(tiny_tokenizer, output, texts, kind="slurm")
    (fake_slurm / "queue").write_text("RUNNING None\n")
    (texts / "12.txt").write_text(story(9))
    for kind in ("local", "slurm"):  # another executor, other input
        with pytest.raises(UserError, match="scancel 7 7 7"):
            prepared(tiny_tokenizer, output, texts, kind=kind)
    check_no_jobs(fake_slurm)
    (fake_slurm / "queue").write_text("")
    prepared(tiny_tokenizer, output, texts).verify()
