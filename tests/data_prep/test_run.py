"""The command line of data preparation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_prep import run, units
from data_prep.settings import ExampleOptions
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import REPOSITORY
from tests.data_prep.conftest import story

RUN = Path(run.__file__)


def test_a_plan_writes_nothing(tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("\n\n".join(story(300, i) for i in range(20)))
    words = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(tiny_tokenizer)]
    run.main([*words, "--plan", "--documents", "blank_line"])
    printed = capsys.readouterr().out
    assert " plan: 1 file, 0.2 MB of text in 1 work unit -> about " in printed
    assert not (tmp_path / "out").exists()
    run.main([*words, "--documents", "blank_line"])
    planned = float(printed.split("about ")[1].split(" M")[0])
    assert planned == pytest.approx(Corpus.open(tmp_path / "out").manifest["tokens"] / 1e6, abs=0.05)


def test_all_problems_of_the_flags_at_once(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path / "out"), "--workers", "0", "--min_sentences", "2", "--without", "heading", "x"]
    words += ["--language", "german", "--format", "txt"]
    done = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    for problem in (
        "error: --input: missing",
        "error: --tokenizer: missing",
        "error: --workers 0: must be greater than 0",
        "error: --min_sentences 2: must be at least 3",
        "error: --without heading x: no such rule. Did you mean 'headings'? Known: boilerplate, ",
        "error: --language german: must be an ISO 639 code, such as en",
        "error: --format txt: must be 'auto', 'text', 'wikiextractor', 'jsonl', 'mediawiki', 'html', 'parquet'",
    ):
        assert problem in done.stderr


def test_the_sample_and_other_text_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sample takes the place of --input"):
        run.main(["--sample", "--input", str(tmp_path), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "sizes, missing",
    [
        ([60], "holds a single document"),
        ([61], "holds a single document"),
        ([60, 60], "there is text for 1 example, and pretraining needs 10 at least"),
        ([6000, 6000], ""),
    ],
)
def test_a_corpus_too_small_for_pretraining_says_what_is_missing(
    sizes: list[int], missing: str, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / "in" / f"{number}.txt").write_text(story(size, number))
    run.main(["--input", str(tmp_path / "in"), "--tokenizer", str(tiny_tokenizer), "--output", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].endswith(" tokens)") and f"({len(sizes)} document{'s' if len(sizes) > 1 else ''}, " in lines[-3]
    assert lines[-1].startswith("missing: " if missing else "next: ") and missing in lines[-1]
    run.main(["verify", str(tmp_path / "out")])
    assert ("1 document (1 row) in 1 shard\n" in capsys.readouterr().out) == (len(sizes) == 1)


def test_what_a_small_corpus_is_measured_by_is_what_its_recipe_says() -> None:
    recipe = yaml.safe_load((REPOSITORY / "pretrain" / "recipes" / "own_text.yaml").read_text())
    data, default = recipe["data"], ExampleOptions.model_fields
    assert (data["validation_fraction"], recipe["train"]["negatives_group"]) == (run.HELD_OUT, run.NEGATIVES)
    measured = default["seq_length"].default, default["num_facets"].default
    assert (data["seq_length"], recipe["model"]["num_facets"]) == measured


@pytest.mark.parametrize("language, told", [("sw", True), ("de", False)])
@pytest.mark.parametrize("command", ["build", "vocabulary"])
def test_a_language_without_rules_is_told(
    command: str, language: str, told: bool, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text(story(60))
    words = [command, "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--language", language]
    run.main([*words, *(["--tokenizer", str(tiny_tokenizer), "--plan"] if command == "build" else ["--size", "60"])])
    assert ("language sw: the sentence splitter has no rules of its own for it" in capsys.readouterr().out) == told


def test_the_manifest_names_the_command_and_the_rules(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{story(4)}\n\nA Title\n\n{story(5, 3)}\n\n1, 2.")
    words = ["--input", f"tales={tmp_path / 'in.txt'}", "--output", str(tmp_path / "out")]
    words += ["--tokenizer", str(tiny_tokenizer), "--without", "headings", "boilerplate", "--min_sentences", "4"]
    run.main([*words, "--near_duplicates"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["command"].startswith("data_prep/run.py --input tales --tokenizer ")
    assert manifest["command"].endswith("--without headings boilerplate --min_sentences 4 --near_duplicates")
    assert not {"headings", "boilerplate"} & set(manifest["made_from"]["rules"])
    assert manifest["dropped"] == {"sentences_without_letter": 1} and manifest["sentences"] == 10
    samples = json.loads((tmp_path / "out" / "dropped.json").read_text())
    assert samples.pop("skipped") == []
    assert samples == {"sentences_without_letter": [{"source": "tales", "document": "in.txt#0", "text": "1, 2."}]}


def test_stats_prints_and_draws(tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text(story(40))
    words = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(tiny_tokenizer)]
    run.main(words)
    run.main(["stats", str(tmp_path / "out"), "--seq_length", "48"])
    assert "40 sentences" in capsys.readouterr().out and (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_vocabulary_of_ones_own_prepares_a_corpus(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{story(300)}\n\nA Title\n\n[MASK] and the cat sat.")
    text = str(tmp_path / "in.txt")
    run.main(["vocabulary", "--input", text, "--output", str(tmp_path / "own"), "--type", kind, "--size", "75"])
    run.main(["--input", text, "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "own")])
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.vocabulary_size <= 75 and not set(corpus.row(0).tokens.tolist()) & {0, *range(1, 17), 18, 19, 20}
    run.main(["show", str(tmp_path / "out"), "0", "--seq_length", "48"])
    with pytest.raises(UserError, match=r"--input: missing; give the text to read\."):
        run.main(["vocabulary", "--output", str(tmp_path / "other")])
    with pytest.raises(UserError, match="--input: missing; give the text to prepare, or --sample"):
        run.main(["--output", str(tmp_path / "other"), "--tokenizer", str(tmp_path / "own")])


def test_near_duplicates_are_dropped(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rensa")
    monkeypatch.setattr(units, "SMALLEST_UNIT", 3000)
    documents = [story(30, i) for i in range(20)]
    documents += [text + " The cat ran far away." for text in documents] + documents[:5]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    words = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(tiny_tokenizer), "--near_duplicates"]
    run.main([*words, "--without", "repeated_lines", "--output", str(tmp_path / "out")])
    corpus = Corpus.open(tmp_path / "out")
    near, exact = (corpus.manifest["dropped"].get(f"documents_{kind}duplicate", 0) for kind in ("near_", ""))
    assert corpus.num_shards > 3
    assert exact == 5 and near >= 20 and corpus.manifest["documents"] == 40 - near


def test_old_names_of_flags_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--num_processes: no such flag. Did you mean '--workers 2'"):
        run.main(["--input", "x", "--output", str(tmp_path / "out"), "--tokenizer", "x", "--num_processes", "2"])
