"""The command line, `stats` and `show`: numbers against plain loops, and messages for mistakes."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_prep import run, stats
from data_prep.examples import ExampleStream
from data_prep.settings import ShowOptions
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import write_json
from tests.data_prep.conftest import (
    SAMPLE_IDS,
    SPECIAL_IDS,
    SPECIALS,
    WORDS,
    prepared,
    squeezed,
    story,
    text_of,
)
from tests.processes import completed


def build(tokenizer: Path, folder: Path, *flags: str, source: str = "") -> None:
    """Prepares in.txt of a folder by the command."""
    words = ["--input", f"{source}{folder / 'in.txt'}", "--output", str(folder / "out")]
    run.main([*words, "--tokenizer", str(tokenizer), *flags])


# flags beside --output OUT --tokenizer TOKENIZER --input IN: what the message names besides the first two
MISTAKES = {
    "--workers -1": "",
    "--min_sentences 0": "",
    "--language german": " de ",
    "--format txt": "jsonl",
    "--sample": "--input",
    "--scheduler nowhere.json": "no such file",
    "--workers -1 --language german": "--language german",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_named(flags: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    with pytest.raises(UserError) as error:
        build(tiny_tokenizer, tmp_path, *flags.split())
    assert all(text in str(error.value) for text in (flags.split()[0], MISTAKES[flags]))
    assert not (tmp_path / "out").exists()


def test_words_that_are_no_command(tmp_path: Path) -> None:
    done = completed([sys.executable, run.__file__, "biuld"])
    assert done.returncode == 2 and "Did you mean 'build'?" in done.stderr
    with pytest.raises(UserError, match=r"input(.|\n)*tokenizer"):
        run.main(["--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match="--input"):
        run.main([str(tmp_path)])


def test_the_last_lines_the_manifest_and_the_samples(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = f"A{'-a' * 4600}."  # 9202 tokens
    (tmp_path / "in.txt").write_text(f"{story(4)}\n\nTitle\n\n{story(5, 3)}\n\n1, 2.\n\n{long}")
    flags = "--without headings --min_sentences 4 --language de --workers 1"
    build(tiny_tokenizer, tmp_path, *flags.split(), source="tales=")
    printed = capsys.readouterr().out
    assert "1 of 1 document" in printed and "--recipe" not in printed
    assert "warning: pretraining needs two documents; --documents blank_line" in printed
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(manifest)
    chosen, packages = (manifest["made_from"][name] for name in ("settings", "packages"))
    assert chosen["without"] == ["headings"] and chosen["language"] == "de" and "numpy" in packages
    dropped = {"sentences_without_letter": 1, "sentences_of_too_many_tokens": 1}
    assert manifest["dropped"] == dropped and manifest["sentences"] == 10
    samples = json.loads((tmp_path / "out" / "dropped.json").read_text())
    ((_, *sample),) = samples["samples"]["sentences_without_letter"]
    assert sample == ["tales", "in.txt#0", "1, 2."] and samples["skipped"] == []
    assert samples["characters"]["tales"]["sentences_of_too_many_tokens"] == 9202
    run.main(["verify", str(tmp_path / "out")])


def test_documents_of_one_sentence_give_no_example(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n\n".join(story(1, i) for i in range(9)))
    flags = "--documents blank_line --min_sentences 1 --workers 1"
    build(tiny_tokenizer, tmp_path, *flags.split())
    assert Corpus(tmp_path / "out").num_documents == 9
    run.main(["stats", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "no example" in printed and "--short_documents join" in printed


@pytest.fixture(scope="module")
def mixed(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two sources; one document takes several rows."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, sizes in (("a", [8, 30, 12_000]), ("b [red]", [9, 14])):
        (folder / name).mkdir()
        for number, size in enumerate(sizes):
            text = f"\x1b[31mA Title\n\n{story(size, number)}"
            (folder / name / f"{number}.txt").write_text(text)
    return prepared(tiny_tokenizer, folder / "corpus", folder / "a", folder / "b [red]")


@pytest.fixture(scope="module")
def table(mixed: Corpus) -> pd.DataFrame:
    """Returns what training sees of the corpus."""
    return stats.training_table(mixed, SPECIAL_IDS, 48)


def test_lengths_and_padding_match_plain_loops(mixed: Corpus, table: pd.DataFrame) -> None:
    documents: dict[int, list[int]] = {}
    for row in map(mixed.row, range(mixed.num_rows)):
        totals = documents.setdefault(row.hash, [0, 0])
        totals[0] += len(row.offsets) - 1
        totals[1] += len(row.tokens)
    assert stats.document_lengths(mixed).T.tolist() == list(documents.values())
    assert mixed.num_rows > mixed.num_documents == 5
    stream = ExampleStream(mixed, SPECIAL_IDS, seq_length=48, seed=0, validation_fraction=0.0)
    epoch = stream.examples(0, range(stream.examples_per_epoch))
    sampled = stats.sampled_examples(mixed, SPECIAL_IDS, 48)
    assert len(sampled) == len(epoch)
    filled = sum(int(example.attention_mask.sum()) for example in epoch)
    assert table["padding"][48] == pytest.approx(1 - filled / (len(epoch) * 3 * 48))
    assert [len(stats.sample_rows(mixed, tokens)) for tokens in (1, 10**9)] == [1, mixed.num_rows]


def test_stats_prints(
    mixed: Corpus,
    table: pd.DataFrame,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:  # --json has the numbers of the command itself
        patch.setattr(stats, "training_table", lambda *_: table)
        run.main(["stats", str(mixed.path), "--seq_length", "48"])
    printed = capsys.readouterr().out
    totals = "{documents} documents, {rows} rows, {sentences:,} sentences, {tokens:,} tokens"
    texts = [totals.format(**mixed.manifest), "b [red]", "left out: 5  lines_heading", "padding"]
    assert all(text in printed for text in texts)
    assert "\x1b" not in printed and "A Title (a: " in printed
    with pytest.raises(UserError, match="at least 16"):
        run.main(["stats", str(mixed.path), "--seq_length", "12"])
    assert stats.visible("text, Ünïcödé, שלום\u202e") == "text, Ünïcödé, שלום\\u202e"


def test_stats_as_json_has_the_numbers_of_the_corpus(
    mixed: Corpus, table: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    run.main(["stats", str(mixed.path), "--seq_length", "48", "--json", "true"])
    found = json.loads(capsys.readouterr().out)
    lengths = stats.document_lengths(mixed)
    assert found["documents"] == 5 and found["tokens"] == lengths[1].sum()
    assert found["lengths"]["tokens a document"]["mean"] == pytest.approx(lengths[1].mean())
    assert found["lengths"]["sentences a document"]["max"] == 12_000
    assert found["left_out"]["lines_heading"]["cases"] == 5
    assert found["left_out"]["lines_heading"]["characters"] == 5 * len("[31mATitle")
    kept, taken = (found["characters"][name] for name in ("kept", "taken"))
    assert taken["a"] - kept["a"] == 3 * len("\x1b[31mATitle") and found["kept"].startswith(
        "5 of 5"
    )
    assert found["seq_length"]["48"]["padding"] == pytest.approx(table["padding"][48])


def test_stats_recommends_a_length_that_keeps_the_objectives_alive(
    corpus_of: Callable[..., Corpus], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = corpus_of([story(3, i) for i in range(200)], min_sentences=3)
    assert corpus.num_rows == 23  # the others are copies
    table = stats.training_table(corpus, SPECIAL_IDS, 100)
    assert stats.fitting_length(table) is None  # a sentence a part has no order
    table["parts with an order"] = 0.6
    fits = table["tokens cut"] <= 0.01
    assert stats.fitting_length(table) == table["padding"][fits].idxmin()
    run.main(["stats", str(corpus.path)])
    printed = capsys.readouterr().out
    assert (
        "length that fits: none: at best" in printed and "0% of the parts have an order" in printed
    )
    hint = stats.length_hint(table.assign(**{"tokens cut": 0.1}), np.array([9, 9, 4000]))
    assert "10.0% of the text is cut" in hint and "sentences of over 512 tokens hold 99.6%" in hint


def test_cut_text_is_a_share_of_the_text(corpus_of: Callable[..., Corpus]) -> None:
    corpus = corpus_of([" ".join(f"The {'cat ' * 99}{'dog ' * i}sat." for i in range(9))])
    cut = stats.training_table(corpus, SPECIAL_IDS, 32)["tokens cut"]
    budget, examples = 32 - 3 - 5, stats.sampled_examples(corpus, SPECIAL_IDS, 32)
    expected = [e.cut_tokens for e in examples]
    assert cut[32] == pytest.approx(
        sum(expected) / (sum(expected) + 3 * budget * len(examples)), abs=0.02
    )
    assert 0.7 < cut[32] < 0.85


def test_stats_counts_copies_unknown_tokens_and_leaks(
    corpus_of: Callable[..., Corpus], capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(f"The {'cat ' * 50}{'dog ' * i}sat." for i in range(6))
    corpus = corpus_of(
        [text] * 4 + [f"Ж {story(6, 3)} {text}", story(9)], without=["duplicate_documents"]
    )
    assert stats.document_lengths(corpus).shape == (2, 6) == (2, corpus.num_documents)
    run.main(["stats", str(corpus.path)])
    printed = capsys.readouterr().out
    unknown = 1 / corpus.manifest["tokens"]
    assert f"{unknown:.2%} of the tokens are unknown" in printed
    assert "held-out sentences of 40" in printed
    stream = ExampleStream(corpus, SPECIAL_IDS, seq_length=64, seed=0, validation_fraction=0)
    assert stream.num_documents == 6


def test_all_copies_of_held_out_sentences_are_found(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share is that of a plain comparison of all sentences; if only some shards are read, the line says so."""
    words = WORDS[:20]
    random.seed(1)
    long = [" ".join(random.choices(words, k=45)).capitalize() + "." for _ in range(99)]
    texts = [" ".join([*random.sample(long, 3), story(6, i)]) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    paths = tmp_path / "out", tmp_path / "in.jsonl"
    corpus = prepared(tiny_tokenizer, *paths, shard_tokens=3000, without=["duplicate_documents"])
    assert corpus.num_shards > 3
    limit, known = corpus.validation_limit(0.2), set(squeezed("".join(long)))
    sides: tuple[list[str], list[str]] = [], []  # training, held out
    is_held_out = np.concatenate([corpus.held_out(i, limit) for i in range(corpus.num_shards)])
    for number in range(corpus.num_rows):
        for sentence in text_of(corpus, number):
            sides[int(is_held_out[number])].extend([sentence] * (sentence in known))
    share = np.mean([sentence in sides[0] for sentence in sides[1]])
    assert 0.5 < share < 1
    printed = stats.held_out_copies(corpus, 0.2)
    assert printed.startswith(f"{share:.1%} of {len(sides[1])} held-out sentences"), printed
    monkeypatch.setattr(stats, "WHOLE_TOKENS", (corpus.manifest["tokens"] + 1) // 2)
    fewer = stats.held_out_copies(corpus, 0.2)
    assert fewer.endswith("in training (in one shard of 2)")
    assert fewer.split()[2] < printed.split()[2], "some held-out sentences are not read"
    documents = sum(shard["documents"] for shard in corpus.manifest["shards"][::2])
    assert stats.document_lengths(corpus).shape == (2, documents)


@pytest.mark.parametrize("text", ["The cat sat on one Ж mat.", "我们去城里。他们也去。"])
def test_unknown_tokens_of_sentencepiece_are_counted(text: str, tmp_path: Path) -> None:
    vocabulary = ["<unk>", *SPECIALS[2:5], "[PAD]", "\u2581", *(f"\u2581{word}" for word in WORDS)]
    pieces = [(piece, -float(i)) for i, piece in enumerate([*vocabulary, *"我们去城里。他也."])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text(f"{text} " * 20)
    corpus = prepared(tmp_path, tmp_path / "out", tmp_path / "in.txt")
    lines = dict(stats.vocabulary_fit(corpus, tokenizer))
    is_english = "cat" in text
    assert ("tokens a word" in lines["vocabulary"]) == is_english
    assert (
        lines["vocabulary"].startswith("0.00%") != is_english and ("warning" in lines) == is_english
    )


def test_show_equals_training(sample_corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {"corpus": str(sample_corpus.path), "row": 5, "seed": 3, "epoch": 1}
    stream = ExampleStream(sample_corpus, SAMPLE_IDS, seq_length=128, seed=3, validation_fraction=0)
    epoch = stream.examples(1, range(stream.examples_per_epoch))
    seen = {example.parts: example.input_ids for example in epoch if example.row == 5}
    for window in range(3):
        example = stream.examples_of_row(5, 1)[window]
        stats.show(ShowOptions(**fixed, window=window))
        text = capsys.readouterr().out
        assert (seen[example.parts] == example.input_ids).all()
        assert f"window {window} of {len(stream.examples_of_row(5, 1))}" in text
        assert text.count("[MASK]") == (example.input_ids == SAMPLE_IDS.mask).sum()
        assert text.count("swapped (label 1)") == (example.so_labels == 1).sum()
        for p in range(3):
            assert f"  + {128 - int(example.attention_mask[p].sum())} [PAD]" in text
    count = len(stream.examples_of_row(5, 1))
    for wrong in ({"window": count}, {"row": sample_corpus.num_rows}):
        with pytest.raises(UserError, match=f"no {' '.join(wrong)} "):
            stats.show(ShowOptions(**fixed | wrong))


def test_special_tokens_have_the_names_of_the_tokenizer(
    mixed: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(mixed.path, folder)
    config = {"cls_token": "[unused1]", "sep_token": {"content": "[unused2]"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_json(folder / "manifest.json", json.loads((folder / "manifest.json").read_text()))
    stats.show(ShowOptions(corpus=str(folder), row=0, seq_length=48))
    text = capsys.readouterr().out
    assert text.count("[unused1]") == 3 and "[unused2]" in text and "[SEP]" not in text
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<mask>"}))
    with pytest.raises(UserError, match="has no <mask>"):
        stats.show(ShowOptions(corpus=str(folder), row=0))
