"""The probe of a run: the same on any ranks and ZeRO stages, resumed, the best step kept, files that are no probe."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from multicls.files import read_json, write_json
from multicls.modeling_multicls import TopicTable
from pretrain.export import load_topics
from pretrain.probing import TrainingProbe, choose_rows
from tests.encoders import WORDS as CORPUS_WORDS
from tests.pretrain.conftest import Fork, logs, records

WORDS = ("river", "city", "music", "war", "church")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixty labelled rows, whose first word is the label of half of them."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    generator = np.random.default_rng(0)
    lines = []
    for number in range(60):
        label = WORDS[number % 2]
        first = label if number % 3 else WORDS[int(generator.integers(5))]
        text = " ".join([first, *generator.choice(WORDS, 6)])
        lines.append(json.dumps({"body": text, "kind": label}))
    path.write_text("\n".join(lines))
    return str(path)


def flags_of(rows: str) -> tuple[str, ...]:
    """Returns the flags of a run that probes the rows."""
    return ("--probe_file", rows, "--text_column", "body", "--label_column", "kind")


def probes(folder: Path) -> list[dict[str, Any]]:
    """Returns the values of the probe in the run's records."""
    found = records(folder, "validation")
    return [{k: v for k, v in line.items() if k.startswith("probe/")} for line in found]


def test_the_same_on_any_ranks_and_stages(fork: Fork, rows: str, tmp_path: Path) -> None:
    flags = (*flags_of(rows), "--model.num_topics", "8")
    found = {}
    cases = (("zero2", 1), ("zero2", 2), ("zero3", 2))
    for stage, ranks in cases:
        folder = tmp_path / f"{stage}_{ranks}" / "run"
        folder.parent.mkdir()
        more = (*flags, "--config", f"ds_configs/{stage}.json", "--run.keep_best", "probe")
        assert fork(folder, {"ranks": ranks}, flags=more) == [[0] * ranks], logs(folder)
        found[stage, ranks] = probes(folder)
        printed = logs(folder)
        assert "probe: 60 of 60 rows of" in printed and "the best embedding is" in printed
        columns = "--text_column body --label_column kind"
        assert f"--train_file {rows} {columns}" in printed and "tools/first_look.py" in printed
        best = [
            max(line[f"probe/{view}"] for view in ("mean", "cls", "facets", "mean_topics"))
            for line in probes(folder)
        ]
        step = (0, 4, 8)[int(np.argmax(best))]
        exported = read_json(folder / "hf" / "export.json")["step"]
        assert exported == (step or 8)
        assert (folder / "best.json").exists() == (step > 0)
    first = found["zero2", 1]
    assert len(first) == 3 and first[0]["probe/mean_change"] == 0.0
    keys = {"probe/mean", "probe/cls", "probe/facets", "probe/mean_topics"}
    assert keys <= first[0].keys() and "probe/facets_change_low" in first[0]
    assert found["zero2", 2][0] == pytest.approx(first[0])  # before weights differ by rounding
    assert found["zero3", 2][0] == pytest.approx(first[0])


def test_no_better_step_exports_the_weights_before(
    fork: Fork, rows: str, tiny_bert: Path, tmp_path: Path
) -> None:
    """The exported model has the topics of the corpus, also without the run's files."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "topics.safetensors").write_bytes(b"of a run that ended before its first checkpoint")
    flags = (*flags_of(rows), "--model.num_topics", "8", "--model.random_weights", "false")
    flags += ("--run.keep_best", "probe", "--learning_rate", "1e-30")  # which moves nothing
    assert fork(folder, flags=flags) == [[0]], logs(folder)
    assert "the weights before training are exported" in logs(folder)
    assert "--head probe --pooling" in logs(folder)
    exported, base = (AutoModel.from_pretrained(path) for path in (folder / "hf", tiny_bert))
    for name, weight in base.encoder.named_parameters():
        assert torch.allclose(exported.encoder.encoder.get_parameter(name), weight), name
    inputs = AutoTokenizer.from_pretrained(folder / "hf")(
        " ".join(CORPUS_WORDS[20:24]), return_tensors="pt"
    )
    topics = TopicTable(exported.config.vocab_size, 8)
    topics.load_state_dict(load_topics(folder))
    shutil.rmtree(folder / "checkpoints")
    (folder / "topics.safetensors").unlink()
    assert torch.equal(exported(**inputs).topics, topics(inputs["input_ids"]))
    assert float(topics(inputs["input_ids"]).norm()) > 0.1


def test_without_labels_recall_of_passages(tmp_path: Path) -> None:
    """A resumed run compares with step 0 of the run before it, not with other passages."""
    documents = np.repeat(np.arange(20), 3)
    generator = np.random.default_rng(0)
    noise = {"mean": generator.normal(size=(60, 4)), "cls": generator.normal(size=(60, 4))}
    topics = generator.normal(size=(20, 4))[documents]
    better = {name: topics + 0.1 * values for name, values in noise.items()}

    def probe(number: int = 60) -> TrainingProbe:
        return TrainingProbe(tmp_path, None, 32, [], None, documents[:number], [])

    metrics, is_best = probe()._compare(noise, 0)
    assert metrics["probe/mean"] < 0.2 and metrics["probe/mean_change"] == 0.0 and not is_best
    resumed = probe()
    metrics, is_best = resumed._compare(better, 4)
    assert is_best and resumed.best_step == 4
    assert metrics["probe/mean"] > 0.3 < metrics["probe/mean_change_high"]
    assert "next-passage recall, mean" in resumed.summary()[0]
    worse = probe()
    worse._compare({name: np.zeros((60, 4)) for name in noise}, 4)
    assert worse.best_step == 0 and len(worse.summary()) == 4
    assert probe().continues() and not probe(30).continues()


def test_the_embedding_to_take_is_that_of_the_exported_step(tmp_path: Path) -> None:
    """With keep_best it is the best of all steps, step 0 included and also after a resume; else of the last one."""
    documents = np.repeat(np.arange(20), 3)
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(60, 4))
    topics = generator.normal(size=(20, 4))[documents]
    poor, fair, good = (topics + size * noise for size in (2, 0.5, 0.1))

    def probe(keeps_best: bool) -> TrainingProbe:
        return TrainingProbe(tmp_path, None, 32, [], None, documents, [], keeps_best=keeps_best)

    for keeps_best, view in ((True, "mean"), (False, "cls")):
        found = probe(keeps_best)
        found._compare({"mean": fair, "cls": noise}, 0)
        found._compare({"mean": noise, "cls": poor}, 4)
        assert found.view == view and f"the best embedding is {view}" in found.summary()[2]
        assert found.best_step == 0
    resumed = probe(True)  # without best.json: step 0 was the best
    resumed._compare({"mean": noise, "cls": poor}, 8)
    assert resumed.view == "mean" and "no gain is shown" in resumed.summary()[-1]
    better, again = probe(True), probe(True)
    better._compare({"mean": noise, "cls": good}, 8)
    assert better.view == "cls"
    write_json(tmp_path / "best.json", better.best)
    again._compare({"mean": noise, "cls": noise}, 12)
    assert (again.view, again.best) == ("cls", better.best)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a", "label": "x"}'] * 30, "all labels are alike"),
        (
            [json.dumps({"text": "a", "label": f"{n}"}) for n in range(30)],
            "each row has another label",
        ),
        (
            [json.dumps({"text": "a", "label": f"{n % 2}"}) for n in range(8)],
            "a probe needs 20 or more",
        ),
        (['{"text": " ", "label": "x"}'] * 30, "no row has a text"),
        (['{"body": "a", "label": "x"}'] * 30, "no column 'text'"),
    ],
)
def test_files_that_are_no_probe(
    lines: list[str], message: str, fork: Fork, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "run"
    assert fork(folder, flags=("--probe_file", str(tmp_path / "rows.jsonl"))) == [[2]]
    assert message in logs(folder) and "Traceback" not in logs(folder)
    assert not (folder / "settings.yaml").exists()


def test_rows_of_a_rare_class_are_kept() -> None:
    targets = np.zeros(1_000, int)
    targets[[500, 900]] = 1
    chosen = choose_rows("class", targets, 100)
    assert {500, 900} <= set(chosen.tolist()) and len(chosen) <= 102
    assert len(choose_rows("score", np.arange(1_000.0), 100)) == 100


def test_three_falls_are_a_warning() -> None:
    probe = TrainingProbe(Path(), None, 32, [], None, np.zeros(2), [])
    probe.history = [0.5, 0.6, 0.5, 0.4]
    assert probe.warnings() == []
    probe.history.append(0.3)
    (warning,) = probe.warnings()
    assert (
        "fell 3 times in a row (60.0, 50.0, 40.0, 30.0)" in warning and "learning_rate" in warning
    )
