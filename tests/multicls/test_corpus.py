"""The shard format: columns, views of rows, and the refusal of other formats."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from multicls.corpus import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_TOKENS,
    Corpus,
    Shard,
    ShardRow,
    held_out_share,
    occurrences,
    write_shard,
)
from multicls.errors import UserError
from multicls.files import write_json


def row(name: str, *sentences: list[int]) -> ShardRow:
    tokens = np.array([token for sentence in sentences for token in sentence], np.uint16)
    offsets = np.cumsum([0] + [len(sentence) for sentence in sentences]).astype(np.int32)
    title, counts = f"title of {name}", occurrences(tokens)
    return ShardRow("source", name, title, 7 << 40, tokens, offsets, counts)


ROWS = [row("a", [1, 2, 1], [3], [1]), row("b", [9, 9], [8])]


def write_corpus(folder: Path, version: int = FORMAT_VERSION, rows: list[ShardRow] = ROWS) -> Path:
    write_shard(folder / "shard-00000.arrow", rows)
    size = (folder / "shard-00000.arrow").stat().st_size
    shard = {"name": "shard-00000.arrow", "rows": len(rows), "bytes": size}
    tokenizer = {"vocabulary_size": 10, "fingerprint": "f"}
    manifest = {"format_version": version, "documents": 2, "files": {}}
    write_json(folder / MANIFEST, manifest | {"shards": [shard], "tokenizer": tokenizer})
    return folder


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    corpus = Corpus(write_corpus(tmp_path))
    assert corpus.num_rows == corpus.num_documents == 2
    for number, expected in enumerate(ROWS):
        found = corpus.row(number)
        assert found[:4] == expected[:4]
        for ours, theirs in zip(found[4:], expected[4:], strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        assert not found.tokens.flags.owndata, "a view of the shard"
    assert corpus.row(0).counts.tolist() == [3, 1, 3, 1, 3]
    with pytest.raises(UserError, match="no row 2; the last row is 1"):
        corpus.row(2)


def test_arrow_columns_carry_the_documented_names(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.arrow", ROWS)
    batch = pa.ipc.open_file(pa.memory_map(str(tmp_path / "s.arrow"))).get_batch(0)
    names = ["source", "id", "title", "hash", "num_tokens", "tokens", "counts"]
    assert batch.schema.names == names
    assert batch.column("tokens").to_pylist() == [[[1, 2, 1], [3], [1]], [[9, 9], [8]]]
    assert Shard(tmp_path / "s.arrow").num_tokens.tolist() == [5, 3]
    assert occurrences(np.zeros(MAX_TOKENS, np.uint16))[0] == MAX_TOKENS


def test_a_corpus_of_an_older_format_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, FORMAT_VERSION - 1)
    message = r"corpus format 5, but this program reads format 6 .*prepare it again"
    with pytest.raises(UserError, match=message):
        Corpus(folder)


@pytest.mark.parametrize(
    ("shares", "fraction", "held_out"),
    [
        ([0.5, 0.25, 0.75], 0.3, [0.25]),
        ([0.5, 0.25, 0.75], 0.25, [0.25]),  # a limit holds out what is below it
        ([0.5, 0.25, 0.25, 0.75], 0.01, [0.25, 0.25]),
        ([0.5, 0.25], 0.0, []),
        ([0.5, 0.5], 0.01, []),
        ([0.0, 0.5], 0.01, [0.0]),
    ],
)
def test_at_least_one_document_is_held_out(
    shares: list[float], fraction: float, held_out: list[float], tmp_path: Path
) -> None:
    rows = [ROWS[0]._replace(hash=int(share * 2**64)) for share in shares]
    limit = Corpus(write_corpus(tmp_path, rows=rows)).validation_limit(fraction)
    found = held_out_share(np.array([row.hash for row in rows], np.uint64))
    assert found[found < limit].tolist() == held_out


LIMITED = """
import resource, sys
from multicls.corpus import Corpus
from multicls.errors import UserError
corpus = Corpus(sys.argv[1])
if sys.argv[2] == "maps":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    corpus.row(0)
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "words"), [("maps", "Cannot allocate memory"), ("files", "Too many open files")]
)
def test_a_system_that_maps_no_more_shards(limit: str, words: str, tmp_path: Path) -> None:
    """Limits of the process stand for those of a corpus of 65,000 shards."""
    folder = write_corpus(tmp_path, rows=[row(str(i), [1] * MAX_TOKENS) for i in range(60)])
    command = [sys.executable, "-c", LIMITED, str(folder), limit]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert words in done.stdout and "vm.max_map_count" in done.stdout and "ulimit -n" in done.stdout
