"""Preparing a corpus folder: formats, determinism, interruptions, short documents, bad input."""

import bz2
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import build, clean, merge, prepare, run
from data_prep.examples import ExampleStream
from data_prep.ledger import Ledger, last_lines
from multicls.corpus import MAX_TOKENS, Corpus
from multicls.errors import UserError
from multicls.files import REPOSITORY, locked
from tests.data_prep.conftest import (
    SPECIAL_IDS,
    large_input,
    prepared,
    same_files,
    squeezed,
    story,
    text_of,
)
from tests.processes import children, completed, program, sessions, until

Make = Callable[..., Corpus]  # of the fixture corpus_of
COUNTS = ("documents", "rows", "sentences", "tokens", "passages")


def test_plain_text_and_compression(tiny_tokenizer: Path, tmp_path: Path) -> None:
    wrapped = textwrap.fill(story(12), width=60)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    text = f"A Tale\nAn Author\n\nCHAPTER I. \n\n{wrapped}\n\nTHE END\n\n1 2 3!\n"
    (tmp_path / "in" / "a.txt").write_text(text)
    (tmp_path / "in" / "deep" / "b.txt.gz").write_bytes(gzip.compress(story(8, 1).encode()))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in")
    assert [text_of(corpus, i) for i in range(2)] == [squeezed(story(12)), squeezed(story(8, 1))]
    assert corpus.manifest["dropped"] == {"lines_heading": 4, "sentences_without_letter": 1}
    assert [corpus.row(i).id for i in range(2)] == ["a.txt#0", "deep/b.txt.gz#0"]
    assert corpus.row(0).source == "in" and corpus.manifest["sources"]["in"]["documents"] == 2
    corpus.verify()


def test_large_vocabularies_get_wide_tokens(tmp_path: Path, tiny_tokenizer: Path) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    first = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"word{i}": first + i for i in range(1 << 16)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "in.txt").write_text(" ".join(f"The word{65000 + i} ran." for i in range(8)))
    corpus = prepared(tmp_path, tmp_path / "out", tmp_path / "in.txt")
    assert corpus.row(0).tokens.dtype == np.uint32
    assert text_of(corpus, 0)[3] == "theword65003ran."


def test_long_documents_take_several_rows_and_shards(corpus_of: Make, tmp_path: Path) -> None:
    documents = [story(30 + i % 17, i % 17) for i in range(60)]
    documents[3] = documents[40] = story(50, 20)
    documents[7] = story(12_000, 3)
    whole = Corpus(corpus_of(documents).path.rename(tmp_path / "whole"))
    rows = [whole.row(i) for i in range(whole.num_rows)]
    long = [row for row in rows if row.hash == max(rows, key=lambda row: len(row.tokens)).hash]
    assert len(long) > 1 and all(len(row.tokens) <= MAX_TOKENS for row in rows)
    assert sum(len(row.offsets) - 1 for row in long) == 12_000
    cut = corpus_of(documents, shard_tokens=900)
    cut.verify()
    assert whole.num_shards == 1 and cut.num_shards > 3
    assert cut.num_documents == whole.num_documents < 60
    for key in ("dropped", "sources"):
        assert cut.manifest[key] == whole.manifest[key]
    tokens = [cut.row(i).tokens.tolist() for i in range(cut.num_rows)]
    assert tokens == [row.tokens.tolist() for row in rows]
    assert (cut.document_frequency == whole.document_frequency).all()


@pytest.mark.parametrize(("without", "kept"), [([], "abe"), (["duplicate_documents"], "abcde")])
def test_copies_go_unless_they_are_to_stay(
    without: list[str],
    kept: str,
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of several stays; a long one takes several rows."""
    monkeypatch.setattr(merge, "PART", 2)  # hashes are sorted in several parts
    texts = dict(zip("abcde", [story(40, 1), story(12_000, 3)] * 2 + [story(20)], strict=True))
    paths = [tmp_path / f"{name}.txt" for name in texts]
    for path in paths:
        path.write_text(texts[path.stem])
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *paths, without=without)
    names = [corpus.row(i).id for i in range(corpus.num_rows)]
    assert list(dict.fromkeys(names)) == [f"{name}.txt#0" for name in kept] != names
    assert corpus.num_documents == len(kept)
    assert corpus.manifest["dropped"].get("documents_duplicate", 0) == 5 - len(kept)


def test_counts_of_copies_and_joined_notes(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """One of three files is a copy: all numbers of the manifest and of the drops are those of plain loops."""
    stories = {"a": story(700, 1), "b": story(40, 4), "c": story(700, 1)}
    for name, text in stories.items():
        (tmp_path / f"{name}.txt").write_text(text)
    inputs = [f"{name}={tmp_path / name}.txt" for name in stories]
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *inputs)
    drops = Ledger(json.loads((corpus.path / "dropped.json").read_text()))
    letters = {name: sum(not c.isspace() for c in text) for name, text in stories.items()}
    assert drops.characters["c"] == {"documents_duplicate": letters["c"]}
    assert drops.counts == {"c": {"documents_duplicate": 1}}
    assert corpus.manifest["dropped"] == {"documents_duplicate": 1}
    share = 1 - letters["c"] / sum(letters.values())
    assert (drops.whole(), drops.share()) == (2, pytest.approx(share))
    expected = {}
    for number, name in enumerate("ab"):
        row = corpus.row(number)
        words = sum(len(sentence.split()) + 1 for sentence in stories[name].split(".")[:-1])
        assert (row.source, len(row.tokens)) == (name, words)
        occurrences = Counter(row.tokens.tolist())
        assert row.counts.tolist() == [occurrences[token] for token in row.tokens.tolist()]
        passages = max(1, round(words / 1000))
        counts = (1, 1, stories[name].count("."), words, passages)
        expected[name] = dict(zip(COUNTS, counts, strict=True))
    assert expected["a"]["passages"] > 2
    assert corpus.manifest["sources"] == expected
    for key in COUNTS:
        assert corpus.manifest[key] == sum(counts[key] for counts in expected.values())


@pytest.mark.parametrize("part", [1, 2, 5, 1 << 24])
def test_copies_in_ranges_of_hashes_are_those_of_a_plain_loop(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes include both ends of the 64-bit numbers; a unit may be empty."""
    monkeypatch.setattr(merge, "PART", part)
    rng = np.random.default_rng(0)
    values = np.append(
        rng.integers(1 << 64, size=9, dtype=np.uint64), np.array([0, 2**64 - 1], np.uint64)
    )
    units = [rng.choice(values, size) for size in (7, 0, 9, 1)]
    folders, seen = [tmp_path / str(number) for number in range(4)], set[int]()
    for folder, hashes in zip(folders, units, strict=True):
        folder.mkdir()
        build.write_hashes(folder, hashes[None].copy())
    found = merge.find_copies(folders, True, "keep", None)
    for hashes, copies in zip(units, found, strict=True):
        for value, is_copy in zip(hashes.tolist(), copies.tolist(), strict=True):
            assert is_copy == (value in seen) * merge.SAME
            seen.add(value)
    assert not np.concatenate(merge.find_copies(folders, False, "keep", None)).any()


def test_a_set_of_hashes_is_a_plain_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "RECENT", 3)
    values = [5, 5, 2**64 - 1, 0, 7, 0, 5, 2**64 - 1, 2**63, 3, 7, 9, 3, 2**63]
    hashes, plain = build.HashSet(), set[int]()
    for value in values:
        assert hashes.add(value) == (value not in plain)
        plain.add(value)


# Determinism and interruptions.


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of files, of which two are a unit; the last repeats the first."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(12):
        write(folder / f"{i:02d}.txt", story(20 + i % 11, i % 11))
    return folder


def write(path: Path, text: str, date: int = 1) -> None:
    """Writes a file of a fixed date, so that a corpus made of it is the same in all tests."""
    path.write_text(text)
    os.utime(path, (date, date))


LEFT: dict[str, int] = {}
EVENTS: dict[str, int] = {}  # number of events of a whole run, by event and settings
FRESH: dict[str, Path] = {}  # corpus of a fresh run, by the change of its input


def interrupt(event: str, _: Any) -> None:
    """An audit hook: of the changes of the disk that `LEFT` counts the last one is interrupted."""
    if event in LEFT:
        LEFT[event] -= 1
        if not LEFT[event]:
            raise KeyboardInterrupt


sys.addaudithook(interrupt)


def prepare_until(
    event: str, share: float, tokenizer: Path, output: Path, texts: Path, **settings: Any
) -> None:
    """Starts a run and interrupts it after a share of the events of a kind that a whole run has."""
    kind = f"{event} {settings}"
    if kind not in EVENTS:
        whole, LEFT[event] = texts.with_name("whole"), 1000
        prepared(tokenizer, whole, texts, **settings)
        EVENTS[kind] = 1000 - LEFT.pop(event)
        shutil.rmtree(whole)
    LEFT[event] = round(share * EVENTS[kind])
    with pytest.raises(KeyboardInterrupt):
        prepared(tokenizer, output, texts, **settings)
    LEFT.clear()


def change_input(folder: Path) -> None:
    """One file comes, one changes, and most go."""
    for path in sorted(folder.glob("*.txt"))[4:]:
        path.unlink()
    write(folder / "05b.txt", story(40, 5), date=2)
    write(folder / "03.txt", story(31, 3), date=2)


def remove_first(folder: Path) -> None:
    """The last file is no copy any more."""
    (folder / "00.txt").unlink()


@pytest.mark.parametrize("change", [lambda folder: None, change_input, remove_first])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.85, 1.0])
def test_a_stopped_run_continues(
    share: float,
    change: Any,
    texts: Path,
    tiny_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The output may lie in the input.
    prepare_until("os.rename", share, tiny_tokenizer, texts / "out", texts, keep_dropped=True)
    with pytest.raises(UserError, match="not a finished corpus"):
        Corpus(texts / "out")
    foreign = [texts / "out" / name for name in (".x", ".manifest.json.bak", "shard-notes.arrow")]
    for path in foreign:
        path.write_text("not ours")
    change(texts)
    prepared(tiny_tokenizer, texts / "out", texts, keep_dropped=True).verify()
    for path in foreign:
        assert path.read_text() == "not ours"
        path.unlink()
    out = (texts / "out").rename(texts.with_name("out"))
    if change.__name__ not in FRESH:
        fresh = FRESH[change.__name__] = tmp_path_factory.mktemp("fresh") / "out"
        prepared(tiny_tokenizer, fresh, texts, keep_dropped=True)
    same_files(FRESH[change.__name__], out)


def test_files_of_rows_are_the_same_however_documents_become_columns(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"shard_tokens": 300, "near_duplicates": "report"}
    prepared(tiny_tokenizer, tmp_path / "whole", texts, **settings)
    monkeypatch.setattr(build, "GROUP_TOKENS", 1)  # each alone
    prepared(tiny_tokenizer, tmp_path / "out", texts, **settings)
    same_files(tmp_path / "whole", tmp_path / "out")


def test_a_run_that_is_stopped_after_the_manifest_removes_its_work(
    texts: Path, tiny_tokenizer: Path
) -> None:
    prepare_until("shutil.rmtree", 1.0, tiny_tokenizer, texts / "out", texts)
    assert (texts / "out" / "manifest.json").exists() and (texts / "out" / "work").exists()
    prepared(tiny_tokenizer, texts / "out", texts).verify()
    assert not (texts / "out" / "work").exists()


def test_files_of_units_are_joined_to_shards_of_a_size(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows and all counts are those of a shard for each file; two sources stand in one shard."""
    (tmp_path / "books").mkdir()
    for number in range(3):
        write(tmp_path / "books" / f"{number}.txt", story(25, 3 + number))
    inputs = [texts, tmp_path / "books"]
    apart = prepared(tiny_tokenizer, tmp_path / "apart", *inputs)
    limit = 3 * (apart.path / "shard-00000.arrow").stat().st_size
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "_finish", interrupted)
        prepared(tiny_tokenizer, tmp_path / "out", *inputs, shard_bytes=limit)
    whole = prepared(tiny_tokenizer, tmp_path / "whole", *inputs, shard_bytes=1 << 30)
    assert whole.num_shards == 1 and whole.shard(0).source_names == ["in", "books"]
    monkeypatch.setattr(merge, "join_shards", None)  # a merge that was stopped goes on
    joined = prepared(tiny_tokenizer, tmp_path / "out", *inputs, shard_bytes=limit)
    joined.verify()
    assert 2 < joined.num_shards < apart.num_shards - 4
    expected, size = list[int](), limit
    for entry in apart.manifest["shards"]:  # a shard ends as soon as its files have the size
        if size >= limit:
            expected.append(0)
            size = 0
        expected[-1] += entry["rows"]
        size += entry["bytes"]
    assert [entry["rows"] for entry in joined.manifest["shards"]] == expected
    for key in ("documents", "rows", "sentences", "tokens", "passages", "sources", "dropped"):
        assert joined.manifest[key] == apart.manifest[key] == whole.manifest[key]
    assert sum(entry["tokens"] for entry in joined.manifest["shards"]) == apart.manifest["tokens"]
    assert (joined.document_frequency == apart.document_frequency).all()
    for number in range(apart.num_rows):
        for corpus in (joined, whole):
            for one, other in zip(apart.row(number), corpus.row(number), strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_shard_keeps_to_its_size_where_short_documents_are_copies(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """And what a killed merge has written is removed."""
    (tmp_path / "in").mkdir()
    short = [story(6, start) for start in range(19)]
    for number in range(6):
        rows = [{"text": text} for text in (story(400, 31 * number), *short)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "in" / f"{number}.jsonl").write_text(lines)
    apart = prepared(tiny_tokenizer, tmp_path / "apart", tmp_path / "in")
    limit = apart.manifest["shards"][1]["bytes"]  # without the copies
    assert apart.num_shards == 6 and apart.manifest["dropped"]["documents_duplicate"] == 5 * 19
    torn = tmp_path / "out" / "work" / f".{'0' * 24}.abcdefgh"
    torn.mkdir(parents=True)
    joined = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in", shard_bytes=limit)
    assert all(entry["bytes"] < 2.5 * limit for entry in joined.manifest["shards"])
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_built_units_are_not_built_again(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "out" / "work"

    def built(**settings: Any) -> set[tuple[str, int]]:
        """The units after a run that is stopped when all of them are built."""
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(merge, "merge", interrupted)
            prepared(tiny_tokenizer, tmp_path / "out", texts, **settings)
        return {(path.parent.name, path.stat().st_ino) for path in work.glob("*/drops.json")}

    first = built()
    (texts / "05.txt").write_text(story(33, 5))
    (work / "notes.txt").write_text("not ours")
    number, second = len(first), built()
    assert 6 <= number < 12 and len(second - first) == 1, "the unit of 05.txt"
    assert len(built(min_sentences=7) - second) == number, "other settings, other units"
    prepared(tiny_tokenizer, tmp_path / "out", texts)
    assert [path.name for path in work.iterdir()] == ["notes.txt"]


def test_two_processes_may_build_one_unit(
    texts: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second worker renames the folder of each unit right before the first one does."""
    prepared(tiny_tokenizer, tmp_path / "whole", texts)
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        if target.parent.name == "work":
            shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    prepared(tiny_tokenizer, tmp_path / "out", texts)
    same_files(tmp_path / "whole", tmp_path / "out")


# Commands of their own, in processes that can be killed.


DEADLY = """
import os, sys
sys.path.insert(0, {repository!r})
from data_prep import clean, run
original = clean.unwrap
def unwrap(lines, *rest):
    os._exit(9) if lines[0].startswith("DEADLY") else None
    return original(lines, *rest)
clean.unwrap = unwrap
if __name__ == "__main__":
    from multicls.errors import run_command
    run_command(run.main)
"""


@pytest.fixture
def command(tiny_tokenizer: Path, tmp_path: Path) -> Any:
    """Words of a command; a text that begins with DEADLY kills its worker."""
    script = tmp_path / "run.py"
    script.write_text(DEADLY.format(repository=str(REPOSITORY)))

    def words(output: Path, *inputs: Path, workers: int = 2) -> list[str]:
        flags = ["--output", str(output), "--tokenizer", str(tiny_tokenizer)]
        flags += ["--workers", str(workers), "--input", *map(str, inputs)]
        return [sys.executable, str(script), *flags]

    return words


def start(words: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Starts a command and waits until it has built a unit; it leads a process group."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, start_new_session=True)
    until(lambda: list(output.glob("work/*/drops.json")) or process.poll() is not None)
    return process


@pytest.mark.slow
def test_kills_of_workers_and_of_the_command(command: Any, tmp_path: Path) -> None:
    """MULTICLS_KILLS sets the number of kills; every second one is of a worker."""
    folder, rng, out = large_input(tmp_path / "in"), np.random.default_rng(0), tmp_path / "out"
    assert completed(command(tmp_path / "whole", folder, workers=1)).returncode == 0
    for number in range(int(os.environ.get("MULTICLS_KILLS", "2"))):
        process = start(command(out, folder), out)
        time.sleep(float(rng.uniform(0, 1)))
        if number % 2 and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        elif workers := workers_of(process.pid):
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        if (out / "manifest.json").exists():
            if process.returncode:  # killed while it removed work/
                assert completed(command(out, folder)).returncode == 0
            same_files(tmp_path / "whole", out)
            shutil.rmtree(out)
    assert completed(command(out, folder)).returncode == 0
    same_files(tmp_path / "whole", out)


@pytest.mark.parametrize("name", ["", ".tokenizer-0123456789ab.json.x.tmp"])
def test_continues_after_an_early_kill(name: str, corpus_of: Make, tmp_path: Path) -> None:
    """A run may be killed while it writes its first file, or while work/ is removed."""
    work = tmp_path / "out" / "work"
    work.mkdir(parents=True)
    if name:
        (work / name).touch()
    corpus_of(story(9))
    assert not work.exists()


def workers_of(parent: int) -> list[int]:
    """Returns the process ids of a command's Dask workers."""
    return [worker for server in children(parent) for worker in children(server)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_command(how: signal.Signals, command: Any, tmp_path: Path) -> None:
    words = command(tmp_path / "out", large_input(tmp_path / "in", 24))
    process = start(words, tmp_path / "out")
    workers = workers_of(process.pid)
    assert len(workers) >= 2
    for pid in workers:  # from their start, when Ctrl-C may come as well
        blocked = re.search(r"SigBlk:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert blocked and int(blocked[1], 16) & 1 << signal.SIGINT - 1
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    printed, errors = process.communicate()
    assert process.returncode == {signal.SIGINT: 130}.get(how, -how)
    assert b"Traceback" not in errors
    assert how != signal.SIGINT or b"the same command continues" in printed
    until(lambda: not sessions().keys() & set(workers))


@pytest.mark.slow
def test_a_unit_that_kills_three_workers_is_named(command: Any, tmp_path: Path) -> None:
    folder = large_input(tmp_path / "in", files=3)
    with (folder / "1.jsonl").open("r+") as file:
        file.write(json.dumps({"text": f"DEADLY {story(9)}"}) + "\n")
    done = completed(command(tmp_path / "out", folder))
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]  # after the bar
    unit = rf"{re.escape(str(folder))}/(1.jsonl|0.jsonl and \d more): killed three workers"
    assert re.search(unit, last), "the unit has the file, and maybe the one before it"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A scheduler of Dask, with its file scheduler.json, and two workers of two threads, outside the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options: Any = {"cwd": tmp_path, "env": environment}
    options |= dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    code = [sys.executable, "-c", "import data_prep"]
    assert subprocess.run(code, **options).returncode == 1
    flags = ["--scheduler-file", "scheduler.json", "--no-dashboard"]
    scheduler = [program("dask"), "scheduler", *flags, "--port", "0", "--host", "127.0.0.1"]
    worker = [program("dask"), "worker", *flags, "--nthreads", "2", "--no-nanny"]
    started = [subprocess.Popen(scheduler, **options)]
    until((tmp_path / "scheduler.json").exists)
    started += [subprocess.Popen([*worker, "--death-timeout", "5"], **options) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_lost_scheduler_ends_the_command_and_loses_nothing(
    command: Any, tmp_path: Path, cluster: list[subprocess.Popen[bytes]]
) -> None:
    words = command(tmp_path / "out", large_input(tmp_path / "in"))
    process = start([*words, "--scheduler", str(tmp_path / "scheduler.json")], tmp_path / "out")
    cluster[0].kill()
    _, errors = process.communicate()
    assert process.returncode == 1 and b"start the command again" in errors, errors
    assert b"Traceback" not in errors
    assert completed(words).returncode == 0
    Corpus(tmp_path / "out").verify()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_outside_the_repository_gets_the_code_from_the_command(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """After a run of one version its workers run another."""
    folder, other = large_input(tmp_path / "in", 6), tmp_path / "other"
    for name in ("data_prep", "multicls"):
        shutil.copytree(REPOSITORY / name, other / name)
    text = (other / "data_prep" / "merge.py").read_text()
    (other / "data_prep" / "merge.py").write_text(text.replace("PASSAGE = 1000", "PASSAGE = 300"))
    places = {"one": ["--workers=1"], "cluster": ["--scheduler", str(tmp_path / "scheduler.json")]}
    for version in (REPOSITORY, other, REPOSITORY):
        for name, where in places.items():
            words = [sys.executable, str(version / "data_prep" / "run.py"), "--input", str(folder)]
            words += ["--tokenizer", str(tiny_tokenizer), "--output", str(tmp_path / name), *where]
            done = completed(words)
            assert done.returncode == 0, done.stderr
        same_files(tmp_path / "one", tmp_path / "cluster")
        corpus = Corpus(tmp_path / "cluster")
        assert (corpus.num_passages > corpus.manifest["tokens"] / 400) == (version == other)
        for name in places:
            shutil.rmtree(tmp_path / name)


# A trial, dropped text, a validation set of one's own.


def test_a_trial_reads_the_first_documents_of_each_source(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    sizes = {"a": 5, "b": 2}
    for source, number in sizes.items():
        (tmp_path / source).mkdir()
        for i in range(number):
            lines = [json.dumps({"text": story(40, 6 * i + j)}) for j in range(2)]
            (tmp_path / source / f"{i}.jsonl").write_text("\n".join(lines) + "\n{")
    inputs = [str(tmp_path / "a"), str(tmp_path / "b"), f"a={tmp_path / 'b'}"]
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *inputs, limit=5)
    ids = [(corpus.row(i).source, corpus.row(i).id.split("#")[0]) for i in range(corpus.num_rows)]
    assert ids == [("a", "0.jsonl")] * 2 + [("a", "1.jsonl")] * 2
    assert corpus.manifest["dropped"] == {"records_not_json": 2, "documents_duplicate": 4}
    assert Ledger(json.loads((corpus.path / "dropped.json").read_text())).documents.total() == 10


def test_all_that_is_dropped_can_be_kept(tiny_tokenizer: Path, tmp_path: Path) -> None:
    bad = f'{{"text": "{"x" * 300}'  # longer than a sample
    rows = [f"A Title\n\n{story(40)}", story(3), "", story(40)]
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(rows)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, bad]))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.jsonl", keep_dropped=True)
    corpus.verify()
    with (corpus.path / "dropped.jsonl").open() as file:
        found = [json.loads(line) for line in file]
    assert [(record["reason"], record["text"]) for record in found] == [
        ("lines_heading", "A Title"),
        ("documents_empty", ""),
        ("records_not_json", bad),
        ("documents_too_short", story(3).replace(". ", ".\n")),
        ("documents_duplicate", ""),
    ]
    assert found[0]["id"] == "in.jsonl#0" and found[-1]["id"] == "in.jsonl#3"
    assert not (
        prepared(tiny_tokenizer, tmp_path / "b", tmp_path / "in.jsonl").path / "dropped.jsonl"
    ).exists()


def test_a_validation_set_of_ones_own(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Its documents alone are held out, and not also trained on."""
    for name, starts in (("train", range(6)), ("held", range(5, 8))):
        lines = [json.dumps({"text": story(60, start)}) for start in starts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = [tiny_tokenizer, tmp_path / "out", tmp_path / "train.jsonl"]
    held = str(tmp_path / "held.jsonl")
    corpus = prepared(*inputs, validation_input=[held])
    assert corpus.num_documents == corpus.num_rows == 8
    options: dict[str, Any] = {"seq_length": 48, "seed": 0, "validation_fraction": 0.5}
    for split, source in (("train", "train"), ("validation", "held")):
        stream = ExampleStream(corpus, SPECIAL_IDS, **options | {"split": split})
        shown = {example.row for example in stream.examples(0, range(stream.examples_per_epoch))}
        assert shown == {i for i in range(8) if corpus.row(i).source == source}
        assert stream.num_documents == len(shown) == {"train": 5, "held": 3}[source]
    with pytest.raises(UserError, match="train is also a source of --input"):
        prepared(*inputs, validation_input=[f"train={held}"])
    with pytest.raises(UserError, match="--validation_input nowhere: no such file"):
        prepared(*inputs, validation_input=["nowhere"])
    train, other = str(tmp_path / "train.jsonl"), tmp_path / "other"
    with pytest.raises(UserError, match="no training document is left"):
        prepared(tiny_tokenizer, other, train, validation_input=[f"copy={train}"])
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": story(2, 5)}))
    with pytest.raises(UserError, match="no held-out document is left"):
        prepared(tiny_tokenizer, other, train, validation_input=[held])
    assert not (other / "manifest.json").exists()


def test_an_output_in_the_input_however_it_is_spelled(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(story(40))
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for output in ("in/out", "link/out", "in/../in/out"):
        corpus = prepared(tiny_tokenizer, tmp_path / output, tmp_path / "in")
        assert corpus.num_documents == 1
    assert prepared(tiny_tokenizer, tmp_path / "in/out", tmp_path / "link").num_documents == 1


# Short documents, and documents that fail.


def test_short_documents_are_dropped_or_joined_in_their_order(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = [f"The cat {i} sat on mat {i}. It ran {i % 7} times." for i in range(2000)]
    rows = [*notes[:5], story(40), *notes[5:], *notes[:2]]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in rows))
    inputs = [tiny_tokenizer, tmp_path / "dropped", tmp_path / "in.jsonl"]
    lines = last_lines(prepared(*inputs))
    assert dict(lines)["kept"].startswith("1 of 2,003 documents")
    (warning,) = (text for name, text in lines if name == "warning" and "in: " in text)
    assert "2,002 documents_too_short. To keep them: --short_documents join" in warning
    inputs[1] = tmp_path / "joined"
    corpus = prepared(*inputs, short_documents="join")
    expected = {"documents_duplicate": 2, "joined_documents": 2000}
    assert corpus.manifest["dropped"] == expected and corpus.num_documents < 200
    assert dict(last_lines(corpus))["kept"].startswith("2,001 of 2,003 documents")
    assert min(len(corpus.row(i).tokens) for i in range(corpus.num_rows)) >= 200
    sentences = [sentence for i in range(corpus.num_rows) for sentence in text_of(corpus, i)]
    joined = [sentence for text in notes for sentence in squeezed(text)]
    assert [s for s in sentences if s not in set(squeezed(story(40)))] == joined


class Panic(BaseException):
    """Stands for a panic of a Rust library, which is no Exception in Python."""


@pytest.mark.parametrize("error", [IndexError, Panic])
@pytest.mark.parametrize("step", [(clean, "unwrap"), (build.TextEncoder, "encode")])
def test_a_document_that_fails_costs_itself_only(
    step: tuple[Any, str], error: Any, corpus_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(*step)

    def failing(*content: Any) -> Any:
        (texts,) = (value for value in content if isinstance(value, list))
        if "FAIL" in str(texts):
            raise error("string index out of range")
        return original(*content)

    monkeypatch.setattr(*step, failing)
    corpus = corpus_of([story(9), "FAIL. " + story(9, 1), story(9, 2)])
    assert corpus.num_documents == 2
    assert corpus.manifest["dropped"] == {"documents_failed": 1}
    samples = json.loads((corpus.path / "dropped.json").read_text())
    (sample,) = samples["samples"]["documents_failed"]
    assert sample[2].startswith("in.jsonl#") and "out of range" in sample[3]


def test_what_a_damaged_file_lost_counts(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part before the damage of a stream of text is kept."""
    lines = "".join(f"{i} {story(1, i)}\n" for i in np.random.default_rng(0).permutation(60_000))
    data = bytearray(bz2.compress(lines.encode(), 1))
    data[len(data) // 2 : len(data) // 2 + 99] = bytes(99)
    (tmp_path / "a.txt.bz2").write_bytes(data)
    (tmp_path / "b.txt").write_text(story(6))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path)
    report = last_lines(corpus)
    kept = dict(report)["kept"]
    assert re.fullmatch(r"[23] of 3 documents, at most (4[5-9]|5[0-5])\.\d% of the text", kept)
    warning = next(text for name, text in report if name == "warning" and "is damaged" in text)
    assert "1 file is damaged (a.txt.bz2#0-damaged)" in warning and "is unknown; " in warning
    assert corpus.manifest["dropped"]["records_file_damaged"] == 1


def test_a_truncated_file_is_a_warning_though_nothing_remains_to_estimate_from(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"text": f"{i} {story(9, i)}"}) + "\n" for i in range(2000))
    packed = gzip.compress(rows.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) * 9 // 10])
    lines = last_lines(prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "a.jsonl.gz"))
    assert "at most 100.0% of the text" in dict(lines)["kept"]
    (warning,) = (text for name, text in lines if name == "warning")
    assert warning.startswith("1 file is damaged") and "how much is lost is unknown" in warning


def test_a_sentence_has_at_most_8191_tokens(corpus_of: Make) -> None:
    """An eighth of what a row takes. Each hyphen and letter is a token."""
    longest, longer = f"A{'-a' * 4094}-.", f"A{'-a' * 4095}."
    corpus = corpus_of(f"{story(9)}\n\n{longest}\n\n{longer}")
    assert corpus.manifest["dropped"] == {"sentences_of_too_many_tokens": 1}
    assert np.diff(corpus.row(0).offsets).max() == 8191


def test_errors_of_a_unit_name_its_file(corpus_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "write_tables", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        corpus_of([story(9)])
    assert "in.jsonl" in caught.value.__notes__[0]


# Bad input and other people's folders.

BAD = {  # content: what the message names
    "Il était. ".encode("latin-1"): "text of another encoding .byte 3.; --encoding",
    story(4).encode(): "documents_too_short 1",
    b'<doc id="1" url="" title="x">\nThe cat.\n': "records_doc_not_closed 1",
    b'{"body": "a"}\n': "--text_field",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_input_is_named_before_writing(content: bytes, corpus_of: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=BAD[content]):
        corpus_of(content)
    assert not (tmp_path / "out").exists()


def test_finished_foreign_and_older_folders(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    arguments = tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt"
    prepared(*arguments)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepared(*arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    with pytest.raises(UserError, match=r"\(documents\)"):
        prepared(*arguments, documents="blank_line")
    (tmp_path / "in.txt").write_text(story(9).replace("cat", "dog"))
    with pytest.raises(UserError, match=r"\(input\)"):
        prepared(*arguments)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="thesis.tex"):
        prepared(tiny_tokenizer, tmp_path / "other", tmp_path / "in.txt")
    with pytest.raises(UserError, match="holds something else"):
        prepared(tiny_tokenizer, tmp_path, tmp_path / "in.txt")
    with locked(tmp_path / "new"), pytest.raises(UserError, match="in use by"):
        prepared(tiny_tokenizer, tmp_path / "new", tmp_path / "in.txt")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs rights that this user has not")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_loses_nothing(
    workers: int, texts: Path, tiny_tokenizer: Path, tmp_path: Path, small_disk: Path
) -> None:
    whole = prepared(tiny_tokenizer, tmp_path / "whole", texts).path
    ballast = small_disk / "ballast"
    size = os.statvfs(small_disk)
    ballast.write_bytes(bytes(size.f_bavail * size.f_bsize - 40_000))
    with pytest.raises(UserError, match="the disk is full|are free there"):
        prepared(tiny_tokenizer, small_disk / "out", texts, workers=workers)
    with pytest.raises(UserError, match="not a finished corpus|no such corpus"):
        Corpus(small_disk / "out")
    ballast.unlink()
    prepared(tiny_tokenizer, small_disk / "out", texts, workers=workers).verify()
    same_files(whole, small_disk / "out")


@pytest.mark.parametrize("name", ["shard-00000.arrow", "document_frequency.npy"])
def test_damaged_corpora_are_found(name: str, corpus_of: Make) -> None:
    corpus = corpus_of(story(9))
    shard = corpus.path / name
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    with pytest.raises(UserError, match="bytes have changed"):
        run.main(["verify", str(corpus.path)])
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="prepare the corpus again"):
        Corpus(corpus.path).shard(0)
    shard.unlink()
    with pytest.raises(UserError, match=f"{name}: missing"):
        Corpus(corpus.path).shard(0)


JOINED = [("01", 0, 1), ("0", 0, 0), ("00", 0, 1), ("01", 400, 1), ("01 23 02", 0, 3)]


@pytest.mark.parametrize(("notes", "words", "documents"), JOINED)
def test_joined_documents_are_long_enough_and_known_by_all_their_notes(
    notes: str, words: int, documents: int, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Two files are a unit, so the third one may begin with a note of the first."""
    paths = [tmp_path / f"{numbers}.jsonl" for numbers in notes.split()]
    for path in paths:
        texts = [f"The cat {i} sat on mat{' a' * words} {i}. It ran {i} times." for i in path.stem]
        path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, story(9)]))
    options: dict[str, Any] = {"min_sentences": 4, "short_documents": "join"}
    options["without"] = ["duplicate_documents"] * (notes == "00")
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *paths, **options)
    assert corpus.num_documents == documents + 1
