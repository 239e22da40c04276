"""Preparing a corpus folder: formats, cleaning, determinism, interruptions, bad input."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep import build, merge, run, units
from data_prep import prepare as prepare_module
from data_prep.examples import ExampleStream
from data_prep.prepare import prepare
from data_prep.settings import ExecutorOptions, PrepareSettings
from data_prep.sources import SourceFile
from multicls.corpus import MAX_TOKENS, Corpus, tokenizer_fingerprint
from multicls.errors import UserError
from tests.data_prep.conftest import SPECIAL_IDS, same_files, story

RUN = Path(run.__file__)


def prepared(tokenizer: Path, output: Path, *inputs: Path | str, workers: int = 1, **settings: Any) -> Corpus:
    given = PrepareSettings(input=tuple(map(str, inputs)), tokenizer=str(tokenizer), **settings)
    return Corpus.open(prepare(given, output, ExecutorOptions(workers=workers), log=lambda _: None))


def text_of(corpus: Corpus, number: int) -> list[str]:
    """The sentences of a document, pieces joined without white space."""
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    document = corpus.row(number)
    pieces = [str(tokenizer.id_to_token(int(i))).removeprefix("##") for i in document.tokens]
    return ["".join(pieces[a:b]) for a, b in zip(document.offsets[:-1], document.offsets[1:], strict=True)]


def squeezed(text: str) -> list[str]:
    return [sentence.replace(" ", "").lower() + "." for sentence in text.split(".") if sentence]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "log.jsonl"}


def test_plain_text_and_compression(tiny_tokenizer: Path, tmp_path: Path) -> None:
    wrapped = textwrap.fill(story(12), width=60)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text(f"A Tale\nAn Author\n\nCHAPTER I. \n\n{wrapped}\n\nTHE END\n\n1 2 3!\n")
    (tmp_path / "in" / "deep" / "b.txt.gz").write_bytes(gzip.compress(story(8, 1).encode()))
    (tmp_path / "in" / "deep" / "c.txt.bz2").write_bytes(bz2.compress(story(7, 2).encode()))
    (tmp_path / "in" / ".hidden").write_bytes(b"\xff\xff")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in")
    assert [text_of(corpus, i) for i in range(3)] == [squeezed(story(n, s)) for n, s in ((12, 0), (8, 1), (7, 2))]
    assert corpus.manifest["dropped"] == {"lines_heading": 4, "sentences_without_letter": 1}
    assert [corpus.row(i).id for i in range(3)] == ["a.txt#0", "deep/b.txt.gz#0", "deep/c.txt.bz2#0"]
    assert corpus.row(0).source == "in" and corpus.manifest["sources"]["in"]["documents"] == 3
    corpus.verify()


def test_blank_lines_between_documents(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{story(8)}\n\n\nThe cat.\n \n{story(9, 3)}\n")
    corpus = prepared(tiny_tokenizer, tmp_path / "out", f"tales={tmp_path / 'in.txt'}", documents="blank_line")
    assert [len(text_of(corpus, i)) for i in range(corpus.num_documents)] == [8, 9]
    assert corpus.manifest["dropped"] == {"documents_too_short": 1} and corpus.row(1).source == "tales"


def test_wikiextractor(tiny_tokenizer: Path, tmp_path: Path) -> None:
    doc = '<doc id="{0}" url="x/{0}" title="The &quot;cat&quot; {0}">\nThe "cat" {0}\n\n{1}\nHistory.\n{2}\n</doc>\n'
    (tmp_path / "wiki_00").write_text(doc.format(7, story(5), story(6, 3)) + doc.format(8, "Ran.", "A mat."))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "wiki_00")
    assert text_of(corpus, 0) == squeezed(story(5)) + squeezed(story(6, 3))
    assert (corpus.row(0).title, corpus.row(0).id) == ('The "cat" 7', "wiki_00#7")
    assert corpus.manifest["dropped"] == {"documents_too_short": 1, "lines_heading": 4}


def test_jsonl(tiny_tokenizer: Path, tmp_path: Path) -> None:
    records = [{"id": 5, "title": "T", "body": story(6)}, {"body": story(7, 1)}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.jsonl", text_field="body")
    assert [corpus.row(i).id for i in range(2)] == ["in.jsonl#5", f"in.jsonl#{1 + len(json.dumps(records[0]))}"]
    assert text_of(corpus, 1) == squeezed(story(7, 1))
    with pytest.raises(UserError, match=r"in.jsonl: no field 'text'; set --text_field. Known: body, id, title"):
        prepared(tiny_tokenizer, tmp_path / "other", tmp_path / "in.jsonl")
    assert not (tmp_path / "other").exists()


def test_mediawiki(tiny_tokenizer: Path, tmp_path: Path) -> None:
    markup = (
        "{{Infobox|a=1}}[[File:x.png|thumb|A dog.]]'''The cat''' sat ({{lang|x}}) "
        "on [[mat|a mat]].&lt;ref&gt;Far.&lt;/ref&gt; "
        f"{story(6)}\n== History ==\n{{|\n|cell\n|}}\n{story(3, 2)}\n[[Category:Cats]]\n"
    )
    page = "<page><title>{0}</title><ns>{1}</ns><id>{2}</id>{3}<revision><id>9</id><text>{4}</text></revision></page>"
    pages = [
        page.format("Cat", 0, 1, "", markup),
        page.format("Talk:Cat", 1, 2, "", story(9)),
        page.format("Kitty", 0, 3, '<redirect title="Cat"/>', "#REDIRECT [[Cat]]"),
    ]
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{"".join(pages)}</mediawiki>'
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "dump.xml.bz2")
    assert corpus.num_documents == 1 and corpus.row(0).title == "Cat"
    assert text_of(corpus, 0) == ["thecatsatonamat.", *squeezed(story(6)), *squeezed(story(3, 2))]
    assert corpus.manifest["dropped"] == {"documents_not_articles": 1, "documents_redirects": 1, "lines_heading": 1}


def test_text_never_becomes_a_special_token(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(
        " ".join(f"The [SEP] cat [MASK] sat [unused0] on [CLS] a [PAD] mat {i}." for i in range(8))
    )
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    assert not set(corpus.row(0).tokens.tolist()) & set(SPECIAL_IDS.all())
    assert text_of(corpus, 0)[0] == "the[sep]cat[mask]sat[unused0]on[cls]a[pad]mat0."


def test_fingerprint_ignores_what_is_added_on_top(tiny_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.add_special_tokens(["[C1]", "[C2]"])
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.normalizer.lowercase = False
    assert tokenizer_fingerprint(tokenizer) != before


def many_files(folder: Path) -> Path:
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(story(3 + i, i) + "\n\n" + story(4, 5 * i))
    return folder


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALLEST_UNIT", 900)
    monkeypatch.setattr(build, "CHUNK_CHARACTERS", 700)
    monkeypatch.setattr(prepare_module, "BYTES_PER_PROCESS", 1)


@pytest.mark.usefixtures("small_steps")
def test_bytes_do_not_depend_on_the_number_of_processes(tiny_tokenizer: Path, tmp_path: Path) -> None:
    texts = many_files(tmp_path / "in")
    one = prepared(tiny_tokenizer, tmp_path / "one", texts)
    prepared(tiny_tokenizer, tmp_path / "three", texts, workers=3)
    assert one.num_shards > 5
    same_files(tmp_path / "one", tmp_path / "three")


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("stage", ["build", "merge"])
def test_a_stopped_run_goes_on_and_never_looks_whole(
    stage: str, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = many_files(tmp_path / "in")
    whole = prepared(tiny_tokenizer, tmp_path / "whole", texts)
    module = {"build": build, "merge": merge}[stage]
    name = {"build": "write_shard", "merge": "_link"}[stage]
    original, calls = getattr(module, name), []

    def stopping(*content: Any) -> None:
        calls.append(content)
        if len(calls) % {"build": 5, "merge": 23}[stage] == 0:
            (tmp_path / "out" / ".shard-00000.arrow.torn").write_bytes(b"torn")
            raise KeyboardInterrupt
        original(*content)

    monkeypatch.setattr(module, name, stopping)
    for _ in range(40):
        try:
            prepared(tiny_tokenizer, tmp_path / "out", texts)
            break
        except KeyboardInterrupt:
            with pytest.raises(UserError, match="not a finished corpus"):
                Corpus.open(tmp_path / "out")
    assert len(calls) > whole.num_shards  # some were done twice, and not many
    assert len(calls) <= {"build": 2, "merge": 6}[stage] * whole.num_shards  # a task of the merge has several parts
    same_files(tmp_path / "whole", tmp_path / "out")


@pytest.mark.usefixtures("small_steps")
def test_a_whole_unit_is_never_read_again(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file may be repaired or taken away in between."""
    texts = many_files(tmp_path / "in")
    read: list[str] = []
    original = build.read_piece

    def counting(file: SourceFile, *others: Any) -> Any:
        read.append(file.name)
        if len(read) == 20:
            raise KeyboardInterrupt
        return original(file, *others)

    monkeypatch.setattr(build, "read_piece", counting)
    with pytest.raises(KeyboardInterrupt):
        prepared(tiny_tokenizer, tmp_path / "out", texts)
    before = len(list((tmp_path / "out" / "work" / "parts").iterdir()))
    (texts / "39.txt").write_text(story(50, 4))  # one of the last, not read yet
    prepared(tiny_tokenizer, tmp_path / "out", texts)
    assert before > 5
    assert max(read.count(name) for name in set(read)) <= 2 and len(read) < 40 + 8
    prepared(tiny_tokenizer, tmp_path / "fresh", texts)
    same_files(tmp_path / "fresh", tmp_path / "out")


HERE = os.environ | {"PYTHONPATH": str(RUN.parents[1])}
SMALL_STEPS = """
import sys
from data_prep import prepare, run, units
units.SMALLEST_UNIT, prepare.BYTES_PER_PROCESS = 100_000, 1
if __name__ == "__main__":
    run.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_kill_9(tiny_tokenizer: Path, tmp_path: Path) -> None:
    texts = tmp_path / "in"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02d}.txt").write_text(story(2000 + i, i))
    (tmp_path / "small_steps.py").write_text(SMALL_STEPS)
    command = [
        sys.executable,
        str(tmp_path / "small_steps.py"),
        "--input",
        str(texts),
        "--tokenizer",
        str(tiny_tokenizer),
    ]
    command += ["--workers", "2", "--output"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL, env=HERE)
    assert Corpus.open(tmp_path / "whole").num_shards >= 20
    parts, kills = [], int(os.environ.get("MULTICLS_KILLS", "3"))
    for wanted in (1 + 12 * kill // kills for kill in range(kills)):
        process = subprocess.Popen(
            [*command, str(tmp_path / "out")], stdout=subprocess.DEVNULL, start_new_session=True, env=HERE
        )
        while len(parts := list((tmp_path / "out").glob("work/parts/*"))) < wanted and process.poll() is None:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(parts) >= 1 + 12 * (kills - 1) // kills and not (tmp_path / "out" / "manifest.json").exists()
    subprocess.run([*command, str(tmp_path / "out")], check=True, stdout=subprocess.DEVNULL, env=HERE)
    same_files(tmp_path / "out", tmp_path / "whole")


def test_finished_and_foreign_folders(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    command = [
        "--input",
        str(tmp_path / "in.txt"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(tiny_tokenizer),
    ]
    first = subprocess.run([sys.executable, str(RUN), *command], capture_output=True, text=True, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = contents(tmp_path / "out")
    again = subprocess.run([sys.executable, str(RUN), "build", *command], capture_output=True, text=True, cwd=tmp_path)
    assert again.returncode == 0 and "already finished" in again.stdout and contents(tmp_path / "out") == before
    others: list[dict[str, Any]] = [{"documents": "blank_line"}, {"language": "de"}]
    for other in others:
        with pytest.raises(UserError, match="other input or settings"):
            prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt", **other)
    with pytest.raises(UserError, match="is no corpus"):
        prepared(tiny_tokenizer, tmp_path, tmp_path / "in.txt")


BAD = {
    "missing": (lambda p: None, "no such file or folder"),
    "empty folder": (lambda p: p.mkdir(), "no file in this folder"),
    "empty file": (lambda p: p.touch(), "empty"),
    "latin 1": (lambda p: p.write_bytes("Il était. ".encode("latin-1")), "not UTF-8 at byte 3"),
    "binary": (lambda p: p.write_bytes(b"MZ\0\0abc"), "binary"),
    "late latin 1": (lambda p: p.write_bytes(b"The cat. " * 10000 + b"\n\xe9"), "documents_not_utf8 1"),
    "torn gzip": (lambda p: p.write_bytes(gzip.compress(os.urandom(9000).hex().encode())[:5000]), "damaged"),
    "too short": (lambda p: p.write_text(story(4)), "no document of enough sentences"),
    "torn extract": (lambda p: p.write_text('<doc id="1" url="" title="x">\nThe cat.\n'), "records_doc_not_closed 1"),
    "torn dump": (lambda p: p.write_text("<mediawiki><page><title>"), "records_file_damaged 1"),
    "not JSON": (lambda p: p.write_text('{"text": "a"}\n{"text": '), "records_not_json 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_named_and_nothing_is_written(
    kind: str, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = BAD[kind]
    path = tmp_path / ("in.gz" if kind == "torn gzip" else "in.txt")
    make(path)
    with pytest.raises(UserError) as caught:
        run.main(
            [
                "--input",
                str(path),
                "--output",
                str(tmp_path / "out"),
                "--tokenizer",
                str(tiny_tokenizer),
                "--workers",
                "1",
            ]
        )
    assert message in str(caught.value) and str(path) in str(caught.value).replace("in the input", str(path))
    assert not (tmp_path / "out").exists()


def test_bad_tokenizer_and_flags(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a fast tokenizer"):
        prepared(tmp_path, tmp_path / "out", tmp_path / "in.txt")
    with pytest.raises(UserError, match="no such file or folder, and the Hub does not provide it"):
        prepared(Path("no-such/tokenizer"), tmp_path / "out", tmp_path / "in.txt")
    with pytest.raises(UserError) as caught:
        run.main(["--output", str(tmp_path / "out"), "--workers", "0"])
    assert len(caught.value.problems) == 3


def test_damaged_corpora_are_found(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    shard = corpus.path / "shard-00000.arrow"
    whole = bytearray(shard.read_bytes())
    middle = len(whole) // 2
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(UserError, match="bytes have changed"):
        run.main(["verify", str(corpus.path)])
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="prepare the corpus again"):
        Corpus.open(corpus.path)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00000.arrow: missing"):
        Corpus.open(corpus.path)
    with pytest.raises(UserError, match="no such corpus folder"):
        Corpus.open(tmp_path / "nowhere")


def test_show_prints_what_training_sees(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text(story(30))
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    run.main(["show", str(corpus.path), "0", "--seq_length", "48"])
    printed = capsys.readouterr().out
    example = ExampleStream(corpus, SPECIAL_IDS, seq_length=48, seed=0, validation_fraction=0.0).examples_of_row(
        0, epoch=0, windows=[0]
    )[0]
    assert printed.count("[CLS] [C1] [C2] [C3] [C4] [C5]") == 3
    assert printed.count("swapped (label 1)") == (example.so_labels == 1).sum()
    assert printed.count("[MASK]") == (example.input_ids == SPECIAL_IDS.mask).sum()
    with pytest.raises(UserError, match="no row 1"):
        run.main(["show", str(corpus.path), "1"])


def test_large_vocabularies_get_wide_pieces(tmp_path: Path, tiny_tokenizer: Path) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"word{i}": len(content["model"]["vocab"]) + i for i in range(1 << 16)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "in.txt").write_text(" ".join(f"The word{65000 + i} ran." for i in range(8)))
    corpus = prepared(tmp_path, tmp_path / "out", tmp_path / "in.txt")
    assert corpus.row(0).tokens.dtype == np.uint32 and corpus.manifest["tokenizer"]["dtype"] == "uint32"
    assert text_of(corpus, 0)[3] == "theword65003ran."


@pytest.mark.slow
def test_real_corpus(multicls_data: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    wiki = sorted((multicls_data / "corpus" / "wiki").rglob("wiki_0*"))[:2]
    books = [multicls_data / "corpus" / "books" / name for name in ("alice.txt", "emma.txt")]
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *wiki, *books, workers=2)
    rows = [row for i in range(corpus.num_rows) if (row := corpus.row(i)).source == "emma"]
    assert len(rows) > 1 and len({(row.id, row.hash) for row in rows}) == 1  # a long book takes several rows
    assert all(len(row.tokens) <= MAX_TOKENS and len(row.offsets) > 100 for row in rows)
    assert 60 < corpus.num_documents < corpus.num_rows
    assert not any(sentence.startswith("chapter") for sentence in text_of(corpus, corpus.num_rows - 1))
