"""The probe of a run: the same on any ranks and ZeRO stages, resumed, the best step kept, files that are no probe."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from multicls.embeddings import EMBEDDINGS, embed_rows
from multicls.errors import UserError
from multicls.evaluation import Difference, evaluate, random_draws, rows_of
from multicls.files import append_jsonl, read_json, write_json
from multicls.labels import LabelledSettings, read_labelled
from multicls.modeling_multicls import TopicTable
from multicls.passages import Passages
from multicls.systems import Linear
from pretrain.export import chosen_step, load_topics
from pretrain.folder import RunFolder
from pretrain.selection import ProbeRows, Selection, choose_rows, read_rows
from pretrain.settings import PretrainSettings
from pretrain.verdict import read_verdict
from tests.encoders import WORDS as CORPUS_WORDS
from tests.pretrain.conftest import Fork, logs, records
from tools import first_look

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


def assert_one_verdict(folder: Path, log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the log, first_look and the card have the same verdict, with the numbers of the exported step."""
    card = (folder / "hf" / "README.md").read_text()
    step = read_json(folder / "hf" / "export.json")["step"]
    values = next(r for r in records(folder, "validation") if r["step"] == step)
    found = read_verdict(RunFolder(folder))
    assert found and found.step == step and found.before == probes(folder)[0]["probe/mean"]
    shown = "\n".join(found.lines())
    assert first_look.main([str(folder)]) == 0
    assert shown in log and shown in capsys.readouterr().out and found.advice in card
    for name, score, change, word in found.rows():
        low, high = (values[f"probe/{name}_change_{end}"] for end in ("low", "high"))
        assert word == ("better" if low > 0 else "worse" if high < 0 else "no clear change")
        assert f"| {name} | {score} | {change} | {word} |" in card
        assert score == f"{100 * values[f'probe/{name}']:.1f}"
    assert values["acc/mlm"] < 0.25 and "fill" not in card, "it cannot fill masks"
    assert (folder / "first_look.png").stat().st_size > 10_000


def test_the_same_on_any_ranks_and_stages(
    fork: Fork, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*flags_of(rows), "--model.num_topics", "8")
    found = {}
    for stage, ranks in (("zero2", 1), ("zero3", 2)):
        folder = tmp_path / f"{stage}_{ranks}" / "run"
        folder.parent.mkdir()
        more = (*flags, "--config", f"ds_configs/{stage}.json", "--run.keep_best", "probe")
        assert fork(folder, {"ranks": ranks}, flags=more) == [[0] * ranks], logs(folder)
        found[stage, ranks] = probes(folder)
        printed = logs(folder)
        assert "probe: 60 of 60 rows of" in printed and "the best step was" in printed
        columns = "--text_column body --label_column kind"
        assert f"--train_file {rows} {columns}" in printed and "tools/first_look.py" in printed
        best = [max(line[f"probe/{view}"] for view in EMBEDDINGS) for line in probes(folder)]
        step = (0, 4, 8)[int(np.argmax(best))]
        exported = read_json(folder / "hf" / "export.json")["step"]
        assert exported == (step or 8)
        assert (folder / "best.json").exists() == (step > 0)
        assert chosen_step(RunFolder(folder), [4, 8]) == (step or 8)
        words = "better|worse|no clear change"
        assert len(re.findall(rf"  validation  loss \S+  score \S+ \S+: (?:{words})", printed)) == 2
        assert_one_verdict(folder, printed, capsys)
    (following,) = re.findall("next: .*", logs(folder))
    assert fork(folder, {"ranks": 2}, flags=more) == [[0, 0]]
    assert "already finished" in logs(folder) and following in logs(folder)
    first = found["zero2", 1]
    assert len(first) == 3 and first[0]["probe/mean_change"] == 0.0
    keys = {f"probe/{name}" for name in EMBEDDINGS}
    assert keys <= first[0].keys() and "probe/facets_change_low" in first[0]
    assert found["zero3", 2][0] == pytest.approx(first[0])  # before weights differ by rounding


def test_no_better_step_exports_the_model_before(
    fork: Fork, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no new facets, which would change the other embeddings, but the topics, also without the run's files.

    The base model may be gone by then.
    """
    rows, folder = str(tmp_path / "rows.jsonl"), tmp_path / "run"
    lines = [
        {"body": f"{WORDS[n % 2]} " * (3 + n % 5) + f"{n}", "kind": WORDS[n % 2]} for n in range(60)
    ]
    Path(rows).write_text("\n".join(map(json.dumps, lines)))
    folder.mkdir()
    (folder / "topics.safetensors").write_bytes(b"of a run that ended before its first checkpoint")
    (folder / "best.json").write_text('{"step": 4}')  # of checkpoints that are gone
    flags = (*flags_of(rows), "--model.num_topics", "8", "--model.random_weights", "false")
    flags += ("--run.keep_best", "probe")  # it cannot be better than right
    base_folder = tmp_path / "base"
    shutil.copytree(tiny_bert, base_folder)
    flags += ("--model", str(base_folder))
    assert fork(folder, flags=(*flags, "--run.time_limit", "0.001")) == [[0]], logs(folder)
    assert read_json(folder / "STOPPED") == {"step": 1, "reason": "run.time_limit"}
    away = base_folder.rename(tmp_path / "away")
    assert fork(folder, flags=flags) == [[0]], logs(folder)
    away.rename(base_folder)
    assert "the model before training is exported" in logs(folder)
    assert "finetune/compare.py --train_file" in logs(folder)
    exported, base = (AutoModel.from_pretrained(path) for path in (folder / "hf", tiny_bert))
    assert exported.config.num_facets == 0 and read_json(folder / "hf" / "export.json")["step"] == 0
    inputs = AutoTokenizer.from_pretrained(folder / "hf")(
        " ".join(CORPUS_WORDS[20:24]), return_tensors="pt"
    )
    assert len(inputs["input_ids"][0]) == 4 + 2, "a facet is in the input"
    states = base.eval()(**inputs).last_hidden_state
    assert torch.equal(exported.eval().embed_sentences(**inputs), states.mean(dim=1))
    assert "weights from before, without new facets" in (folder / "hf" / "README.md").read_text()
    before, *_, after = probes(folder)
    assert before["probe/mean"] == 1.0
    assert "probe/facets" not in before and "probe/facets" in after, "new facets before a step"
    table = read_labelled(rows, LabelledSettings(text_column="body", label_column="kind"))
    plain_rows = rows_of(table, rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    features = embed_rows(base, tokenizer, table.texts, max_length=32)
    with_features = dataclasses.replace(plain_rows, features=features)
    splits = random_draws(plain_rows, 100, 10)
    scores = evaluate({"mean": Linear(("mean",))}, with_features, splits)
    assert before["probe/mean"] == pytest.approx(scores["mean"].mean)
    topics = TopicTable(exported.config.vocab_size, 8)
    topics.load_state_dict(load_topics(RunFolder(folder)))
    assert first_look.main([str(folder)]) == 0
    assert "Use the original model: nothing was better" in capsys.readouterr().out
    (folder / "probe.json").unlink()
    with pytest.raises(UserError, match=r"finetune/compare\.py"):
        first_look.main([str(folder)])
    shutil.rmtree(folder / "checkpoints")
    (folder / "topics.safetensors").unlink()
    assert torch.equal(exported(**inputs).topics, topics(inputs["input_ids"]))
    assert float(topics(inputs["input_ids"]).norm()) > 0.1


UNTRAINED = (
    "--recipe topics --model.random_weights false --model.num_topics 8 --data.seq_length 32 "
    "--micro_batch_size 15"
)


def test_a_run_without_steps_adds_topics(
    fork: Fork, rows: str, tiny_bert: Path, tmp_path: Path
) -> None:
    """Nothing is trained, also by the same command again, and no examples are needed. Labels judge the topics."""
    folder = tmp_path / "run"
    flags = (*UNTRAINED.split(), *flags_of(rows))
    assert fork(folder, {}, {}, flags=flags) == [[0], [0]], logs(folder)
    assert all("done: nothing was trained" in logs(folder, launch) for launch in (0, 1))
    assert not (folder / "checkpoints").exists()
    exported, base = (AutoModel.from_pretrained(path) for path in (folder / "hf", tiny_bert))
    theirs = base.state_dict()
    ours = {k.removeprefix("encoder."): w for k, w in exported.state_dict().items()}
    assert all(torch.equal(ours[name][: len(w)], w) for name, w in theirs.items())
    assert exported.topics.table.shape[1] == 8 and exported.topics.idf.any()
    (record,) = probes(folder)
    assert record["probe/mean+topics"] > 0 and record["probe/cosine_to_start"] > 0.999
    assert "probe/facets" not in record


def test_a_run_without_steps_and_labels_measures_nothing(fork: Fork, tmp_path: Path) -> None:
    """Recall would judge the embedding, which no step changes."""
    folder = tmp_path / "run"
    assert fork(folder, flags=tuple(UNTRAINED.split())) == [[0]], logs(folder)
    printed = logs(folder)
    assert "nothing is measured" in printed and "next-passage recall" not in printed
    assert "first_look" not in printed and "next:  " in printed
    assert records(folder, "validation") == [] and not (folder / "probe.json").exists()
    card = (folder / "hf" / "README.md").read_text()
    assert "Does it help?" not in card and "No step was better" not in card
    assert "topics of the words of a corpus" in card and "planned optimizer steps" not in card
    assert AutoModel.from_pretrained(folder / "hf").topics.idf.any()


DOCUMENTS = np.repeat(np.arange(20), 3)


def selection_of(
    folder: Path,
    keeps_best: bool = False,
    untouched: Any = None,
    report: Any = print,
    reference: str = "mean",
) -> Selection:
    """Returns a selection by passages of twenty documents."""
    values: dict[str, Any] = {"model": {"checkpoint": "m"}, "data": {"corpus": "c"}}
    values["train"] = {"steps": 9}
    values["run"] = {"output_dir": str(folder), "keep_best": "probe" if keeps_best else None}
    settings, rows = PretrainSettings.model_validate(values), ProbeRows([], Passages([], DOCUMENTS))
    return Selection(settings, rows, None, untouched=untouched, report=report, reference=reference)


def test_the_baseline_is_the_base_models_own_embedding(tmp_path: Path) -> None:
    """A checkpoint with [CLS] pooling has its [CLS] as the baseline."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(60, 4))
    near = generator.normal(size=(20, 4))[DOCUMENTS] + 0.1 * noise
    for reference, mean in (("mean", 0.0), ("cls", -1.0)):
        selection = selection_of(tmp_path, reference=reference)
        metrics = selection.compare({"mean": noise, "cls": near}, 0)
        assert metrics[f"probe/{reference}_change"] == 0.0
        assert np.sign(metrics["probe/mean_change"]) == mean
        assert read_json(tmp_path / "probe.json")["reference"] == reference


def unused() -> Any:
    """Stands for what builds the model that step 0 measures."""


def test_harm_is_said_although_another_step_is_kept(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    noise, topics = generator.normal(size=(60, 4)), generator.normal(size=(20, 4))[DOCUMENTS]
    good, poor = topics + 0.1 * noise, noise
    for cls, what in ((poor, "mean, cls"), (good, "mean")):
        lines = list[str]()
        selection = selection_of(tmp_path, True, unused, lines.append)
        selection.compare({"mean": good, "cls": good}, 0)
        selection.compare({"mean": poor, "cls": cls}, 4)
        warning = f"warning: worse are {what}. Use fewer"
        selection._seconds, selection._begun = 0.5, time.perf_counter() - 10
        summary = selection.summary()
        assert summary[0] == "the best step was 0; measuring took 0 s, 5.0% of the time"
        assert summary[1].startswith(warning)
        assert not selection.keeps(4) and not lines


def test_the_verdict_on_each_step(tmp_path: Path) -> None:
    """Only an embedding whose interval leaves out 0 is recommended; the best step is exported, also after a resume."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(60, 4))
    topics = generator.normal(size=(20, 4))[DOCUMENTS]
    poor, fair, good = (topics + size * noise for size in (2, 0.5, 0.1))
    selection, folder = selection_of(tmp_path, True, unused), RunFolder(tmp_path)
    steps = [(0, fair, noise), (4, fair + 0.01, poor), (8, noise, good), (12, noise, noise)]
    for step, mean, cls in steps:
        metrics = selection.compare({"mean": mean, "cls": cls}, step)
        append_jsonl(folder.metrics, {"step": step, "split": "validation", **metrics})
        if selection.keeps(step):
            selection.on_kept(step)
    found = [read_verdict(folder, step) for step, *_ in steps]
    assert [v.embedding for v in found if v] == ["", "", "cls", ""]
    assert [v.advice.partition(": ")[0] for v in found if v][1:3] == [
        "Use the original model",
        "Use cls",
    ]
    assert found[3] and found[3].advice.endswith("all embeddings are worse.")
    assert found[0] and found[0].title.startswith(
        "next-passage recall, 0 passages; original model (mean)"
    )
    again = selection_of(tmp_path, True, unused)
    again.compare({"mean": noise, "cls": noise}, 16)
    assert {16: again.history.pop(16)} and again.history == selection.history
    assert again.exported(16) == 8
    again.compare({"mean": noise, "cls": good}, 8)
    assert again.keeps(8), "its checkpoint was removed: the same step is the best again"
    with mock.patch.object(RunFolder, "saved_steps", [8]):
        assert not again.keeps(8)
    for keeps_best, untouched, exported in ((True, unused, 0), (False, unused, 4), (True, None, 4)):
        other = selection_of(tmp_path / "other", keeps_best, untouched)
        (tmp_path / "other").mkdir(exist_ok=True)
        other.compare({"mean": fair, "cls": noise}, 0)
        other.compare({"mean": noise, "cls": poor}, 4)
        assert other.exported(4) == exported, (
            "a model that began at random is not exported at step 0"
        )


def test_a_file_that_is_no_probe_leaves_no_run(fork: Fork, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n' * 4
    )
    folder = tmp_path / "run"
    assert fork(folder, flags=("--probe_file", str(tmp_path / "rows.jsonl"))) == [[2]]
    assert "a probe needs 20 or more" in logs(folder) and "Traceback" not in logs(folder)
    assert not folder.exists()


def test_a_run_resumes_with_the_rows_it_began_with(tmp_path: Path) -> None:
    """Scores of other rows cannot be compared with those of step 0."""
    rows = [f'{{"text": "text {number}", "label": "{number % 2}"}}' for number in range(900)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows[:: 1 if name == "a" else -1]))
    no_corpus: Any = None

    def read(file: str = "a", resumes: bool = True) -> Any:
        values: dict[str, Any] = {"train": {"steps": 100}}
        values |= {"model": {"checkpoint": "m"}, "data": {"corpus": "c"}}
        values["probe"] = {"file": str(tmp_path / f"{file}.jsonl")}
        values["run"] = {"output_dir": str(tmp_path), "eval_every": 1000}
        settings = PretrainSettings.model_validate(values)
        return read_rows(settings, no_corpus, None, resumes=resumes)

    first, (*_, note) = read(resumes=False)
    assert (
        len(first.texts) == 300
        and len(first.measure.splits.draws) == 10
        and "300 of 900 rows" in note
    )
    with pytest.raises(UserError, match="or with none"):
        read()
    write_json(tmp_path / "probe.json", {"hash": first.hash})
    again = read()[0]
    assert again.texts == first.texts
    pairs = zip(again.measure.splits.draws, first.measure.splits.draws, strict=True)
    assert all(np.array_equal(a[0], b[0]) for a, b in pairs)
    with pytest.raises(UserError, match="the run began with other rows"):
        read("b")


def test_rows_of_a_rare_class_are_kept() -> None:
    targets = np.zeros(1_000, int)
    targets[[500, 900]] = 1
    chosen = choose_rows("class", targets, 100)
    assert {500, 900} <= set(chosen.tolist()) and len(chosen) <= 102
    assert len(choose_rows("score", np.arange(1_000.0), 100)) == 100


def test_a_fall_over_three_validations_is_a_warning(tmp_path: Path) -> None:
    """A resume between the validations changes nothing."""
    lines = list[str]()
    views = {"mean": np.random.default_rng(0).normal(size=(60, 4))}
    selection = selection_of(tmp_path, report=lines.append)
    selection.compare(views, 0)
    selection.history = {0: 0.5, 2: 0.6, 4: 0.5}
    selection.keeps(0)
    assert lines == []
    selection.history[6] = 0.4
    selection.keeps(0)
    assert lines == [], "no clear change"
    selection.last = {"mean": Difference(-0.1, -0.2, -0.05)}
    selection.keeps(0)
    falls = "warning: the next-passage recall falls (60.0, 50.0, 40.0 at 3 validations). Use fewer"
    assert len(lines) == 1 and lines[0].startswith(falls)
    scores = [{"step": 2, "probe/mean": 0.9}, {"step": 4, "probe/mean": 0.8, "probe/cls": 0.1}]
    records = [{"step": 1, "loss/mcqt": 1.0}, *scores, {"step": 6, "probe/mean": 0.1}]
    text = "".join(json.dumps(line) + "\n" for line in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    resumed = selection_of(tmp_path, report=lines.append)
    resumed.compare(views, 6)
    assert list(resumed.history) == [0, 2, 4, 6] and resumed.history[2] == 0.9
    resumed.last = selection.last
    resumed.keeps(6)
    assert sum("falls" in line for line in lines) == 2
