"""The study: its planner, its way from packed inputs to the page with an interruption, and the rules of its page."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmarks import study, study_inputs, study_page, study_plan
from benchmarks.study_plan import ARMS, LADDER, SMOKE, Evaluation, Measured, Plan, Pretraining, decide
from finetune.grid import GridSettings, expand
from finetune.store.results import Store
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import read_json, read_jsonl, sha256_of, write_json
from multicls.settings import load_settings
from tests.finetune.show.fake import fake_row
from tests.processes import until

TIMES = Measured(pretrain_start=15, step=0.1, step_tokens=3000, grid_start=10,
                 runs={(size, task): size / 100 for size in (100, 1000) for task in study_plan.TASKS})  # fmt: skip
ONE_PASS = 2e7


def plan_of(train: Pretraining, check: Evaluation, folder: Path, **changes: Any) -> Plan:
    """A plan for the inputs in `folder`/inputs."""
    places = {name: str(folder / "inputs" / name) for name in ("corpus", "data")}
    values: dict[str, Any] = {
        "size": "smoke", "budget": None, "device": "cpu", "hardware": "a test", "jobs": 2, "one_pass": 1e6,
        "base": str(folder / "inputs" / "model"), "base_name": "tiny", "expected": {}, "made": "2026-01-01",
    }  # fmt: skip
    return Plan(**(values | places | changes), pretraining=train, evaluation=check)


# The planner.


def test_a_budget_is_kept_to_and_more_of_it_is_never_less_pretraining() -> None:
    found = [decide(TIMES, minutes * 60, ONE_PASS, 6, math.ceil(minutes / 8)) for minutes in range(20, 400, 7)]
    tokens = [train.tokens * len(train.seeds) for train, *_ in found]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]
    for minutes, (train, check, expected) in zip(range(20, 400, 7), found, strict=True):
        first = study_plan.pretraining_seconds(TIMES, train.tokens, len(train.seeds), 6)
        second = study_plan.evaluation_seconds(TIMES, check, len(train.seeds), 6)
        assert expected == {"pretraining": first, "evaluation": second}
        assert first <= 0.5 * minutes * 60 and first + second <= 0.9 * minutes * 60
        larger = LADDER[: LADDER.index(check)]
        rest = 0.9 * minutes * 60 - math.ceil(minutes / 8) * 15 - first
        assert all(study_plan.evaluation_seconds(TIMES, one, len(train.seeds), 6) > rest for one in larger)
    assert len({check.level for _, check, _ in found}) >= 3


def test_one_pass_comes_before_more_seeds_and_these_before_more_passes() -> None:
    plans = [decide(TIMES, hours * 3600, ONE_PASS, 6, 1)[0] for hours in (0.5, 1, 1.5, 2, 4, 8)]
    for train in plans:
        assert train.tokens <= ONE_PASS or len(train.seeds) == study_plan.MOST_SEEDS
        assert len(train.seeds) == 2 or train.tokens >= ONE_PASS
    assert [len(train.seeds) for train in plans] == [2, 2, 3, 4, 4, 4]
    assert plans[-1].tokens > ONE_PASS


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(UserError, match=r"do not suffice .* about (\d+)m") as error:
        decide(TIMES, 120, ONE_PASS, 6, 1)
    needed = study.seconds_of("", str(error.value).split("about ")[1].split("m")[0] + "m") + 60
    assert decide(TIMES, needed, ONE_PASS, 6, 1)[1] == LADDER[-1]


def test_the_ladder_goes_down() -> None:
    seconds = [study_plan.evaluation_seconds(TIMES, level, 2, 6) for level in LADDER]
    assert seconds == sorted(seconds, reverse=True)


def test_all_arms_have_equal_tokens_and_sequences(tmp_path: Path) -> None:
    from pretrain import run

    for train in (SMOKE[0], Pretraining(tokens=1e6, seeds=(1, 2))):
        plan, settings = plan_of(train, SMOKE[1], tmp_path), []
        for arm in ARMS:
            command = study.pretrain_command(tmp_path, plan, train, arm, tmp_path / arm, seed=2)
            settings.append(run.parse(command[1:])[1])
        assert {(one.train.tokens, one.train.steps, one.train.seed) for one in settings} == {(train.tokens, 0, 2)}
        batches = [one.train.global_batch_size * one.model.num_parts for one in settings]
        assert set(batches) == {train.sequences}
        assert [one.model.num_facets for one in settings] == [arm.facets for arm in ARMS.values()]
        assert [one.model.num_parts for one in settings] == [arm.parts for arm in ARMS.values()]
        assert [one.objective.mcqt for one in settings] == [0, 1, 1, 1, 1, 1]
        assert [one.model.facet_layers for one in settings] == [[], [], None, None, None, []]


def test_grids_have_as_many_runs_as_planned(tmp_path: Path) -> None:
    for train, check in (SMOKE, (Pretraining(tokens=1e6, seeds=(1, 2, 3)), LADDER[0])):
        plan = plan_of(train, check, tmp_path)
        models = {"base": ["B"]} | {arm: [f"{arm}{seed}" for seed in train.seeds] for arm in ARMS}
        count = {}
        for name, (_, recipe) in study_plan.grids(plan, models).items():
            (tmp_path / "grid.yaml").write_text(yaml.safe_dump(recipe))
            count[name] = len(expand(load_settings(GridSettings, [tmp_path / "grid.yaml"]), "results"))
        assert count["results"] + count["ensembles"] == study.progress(tmp_path, plan)["evaluation"][1]
        assert count["facets"] == len(check.ensemble_tasks)


@pytest.mark.parametrize("text", ["25", "m", "0m", "-3m", "1d"])
def test_times_are_told_apart_from_nonsense(text: str) -> None:
    assert [study.seconds_of("", time) for time in ("90s", "25m", "1.5h")] == [90, 1500, 5400]
    with pytest.raises(UserError, match="write a time as"):
        study.seconds_of("--budget", text)


def test_an_existing_plan_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--inputs"):
        study.main(["--budget", "5m", "--output_dir", str(tmp_path / "new")])
    with pytest.raises(UserError, match="no such file"):
        study.main(["--budget", "5m", "--inputs", str(tmp_path / "none"), "--output_dir", str(tmp_path / "new")])
    write_json(tmp_path / "plan.json", plan_of(*SMOKE, tmp_path).model_dump(mode="json"))
    for flags in (["--budget", "5m"], ["--device", "cuda"]):
        with pytest.raises(UserError, match=r"plan\.json was made for"):
            study.main([*flags, "--output_dir", str(tmp_path)])


def test_weights_that_16_bits_cannot_hold_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_file({"large": torch.tensor([1e6])}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match=r"weights too large for 16 bits \(large\)"):
        study_inputs.pack_model(str(tmp_path / "base"), tmp_path / "packed")


def test_the_deadline_asks_what_runs_to_leave(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def leave(*_):\n    pathlib.Path(sys.argv[1]).write_text('saved'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "pathlib.Path(sys.argv[1]).write_text('running')\n"
        "while True: time.sleep(0.01)\n"
    )

    class UntilRunning(study.Call):
        @property
        def deadline(self) -> float:  # comes when the first command runs
            seen = (tmp_path / "a.txt").exists() and (tmp_path / "a.txt").read_text() == "running"
            return 0.0 if seen else time.monotonic() + 60

        @deadline.setter
        def deadline(self, _: float) -> None: ...

    call = UntilRunning(tmp_path, 60, "cpu", 1)
    watched: list[int] = []
    call.watch = lambda: watched.append(1)
    assert not call.run_all({name: [str(script), str(tmp_path / f"{name}.txt")] for name in "ab"})
    assert not watched, "progress is read every 10 seconds"
    assert (tmp_path / "a.txt").read_text() == "saved" and not (tmp_path / "b.txt").exists()
    script.write_text("import sys; sys.exit('broken on purpose')")
    with pytest.raises(UserError, match="c ended with code 1: broken on purpose"):
        study.Call(tmp_path, 60, "cpu", 1).run_all({"c": [str(script)]})


# The whole way.


def write_rows(folder: Path, words: list[str]) -> None:
    """Writes train and dev rows of the study's tasks in their official layouts."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(words, k=5))

    tables = {
        "glue/CoLA": (None, lambda n: ["s", n % 2, "", text()]),
        "glue/SST-2": (["sentence", "label"], lambda n: [text(), n % 2]),
        "glue/MRPC": (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], lambda n: [n % 2, n, n, text(), text()]),
        "glue/STS-B": (["sentence1", "sentence2", "score"], lambda n: [text(), text(), n % 6]),
        "glue/RTE": (["index", "sentence1", "sentence2", "label"],
                     lambda n: [n, text(), text(), ("entailment", "not_entailment")[n % 2]]),
    }  # fmt: skip
    objects = {
        "CB": lambda n: {"premise": text(), "hypothesis": text(), "label": "neutral", "idx": n},
        "COPA": lambda n: {"premise": text(), "choice1": text(), "choice2": text(), "question": "cause",
                           "label": n % 2},
        "WiC": lambda n: {"sentence1": words[0], "sentence2": words[0], "word": words[0], "label": n % 2 == 0,
                          **{f"start{k}": 0 for k in (1, 2)}, **{f"end{k}": 3 for k in (1, 2)}},
    }  # fmt: skip
    for part, count in (("train", 40), ("dev", 20)):
        for name, (header, row) in tables.items():
            lines = ([header] if header else []) + [row(n) for n in range(count)]
            (folder / name).mkdir(parents=True, exist_ok=True)
            content = "".join("\t".join(map(str, line)) + "\n" for line in lines)
            (folder / name / f"{part}.tsv").write_text(content)
        for name, make in objects.items():
            (folder / "superglue" / name).mkdir(parents=True, exist_ok=True)
            content = "".join(json.dumps(make(n)) + "\n" for n in range(count))
            (folder / "superglue" / name / f"{part.replace('dev', 'val')}.jsonl").write_text(content)


@pytest.fixture(scope="module")
def packed(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed inputs of invented text and rows and the tiny BERT."""
    folder = tmp_path_factory.mktemp("packed")
    vocabulary = json.loads((tiny_bert / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) == 3)
    write_rows(folder / "data", words)
    draw = random.Random(1)
    for number in range(40):
        path = folder / ("wiki" if number % 2 else "books") / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(f"{' '.join(draw.choices(words, k=6)).capitalize()}." for _ in range(30)))
    sources = [f"{name}={folder / name}" for name in ("wiki", "books")]
    flags = ["--text", *sources, "--data_dir", str(folder / "data"), "--base", str(tiny_bert)]
    for name in ("inputs.tar.xz", "again.tar.xz"):
        assert study.main(["pack", *flags, "--output", str(folder / name)]) == 0
    return folder / "inputs.tar.xz"


@pytest.mark.slow
def test_packed_inputs_are_the_same_bytes_and_whole(packed: Path, tmp_path: Path) -> None:
    assert sha256_of(packed) == sha256_of(packed.with_name("again.tar.xz"))
    inputs = study_inputs.unpack(packed, tmp_path / "inputs")
    corpus = Corpus.open(inputs / "corpus")
    assert corpus.manifest["sources"].keys() == {"wiki", "books"} and corpus.row(0).counts.min() == 1
    for path in (packed.parent / "data").rglob("*.*"):
        assert (inputs / "data" / path.relative_to(packed.parent / "data")).read_bytes() == path.read_bytes()
    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(packed.read_bytes()[:-2000])
    with pytest.raises(UserError, match="not packed inputs, or damaged"):
        study_inputs.unpack(damaged, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_budget_is_measured_once(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Evaluation(level="tiny", tasks=("sst2", "stsb"), train_sizes=(16, 32), epochs=2, max_length=32,
                      ensemble_tasks=("sst2",))  # fmt: skip
    monkeypatch.setattr(study_plan, "LADDER", (tiny, tiny.model_copy(update={"level": "less", "seeds": (1,)})))
    monkeypatch.setattr(study, "Pretraining", partial(Pretraining, seq_length=32, sequences=6, eval_examples=6))
    monkeypatch.setattr(study, "PROBE_FINETUNING", 4)
    monkeypatch.setattr(study, "work", lambda *_: None)
    folder = tmp_path / "study"
    flags = ["--inputs", str(packed), "--device", "cpu", "--output_dir", str(folder), "--piece", "1h"]
    assert study.main([*flags, "--budget", "900h"]) == 0
    plan = Plan.model_validate(read_json(folder / "plan.json"))
    assert plan.budget == 900 * 3600 and plan.expected.keys() == {"pretraining", "evaluation"}
    assert 0 < sum(plan.expected.values()) < 0.9 * plan.budget
    assert plan.evaluation.level in ("tiny", "less")  # which of them is a matter of this machine's speed
    assert not (folder / "probe").exists() and (folder / "inputs").is_dir()
    assert [call["stage"] for call in read_jsonl(folder / "calls.jsonl")] == ["planning"]
    monkeypatch.delattr(study, "measure")
    assert study.main(["--output_dir", str(folder)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_inputs_to_the_page_with_an_interruption(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in set(ARMS) - {"mtl", "k5"}:
        monkeypatch.delitem(ARMS, arm)
    monkeypatch.setitem(study_plan.ENSEMBLE_SYSTEMS, "cls", ["base"])
    folder = tmp_path / "study"
    study_inputs.unpack(packed, folder / "inputs")
    train = Pretraining(tokens=2000, seeds=(1, 2), sequences=6, seq_length=32, eval_every=4, eval_examples=6)
    check = Evaluation(level="tiny", tasks=("sst2", "stsb"), train_sizes=(16,), learning_rates=(1e-3,), draws=(1, 2),
                       seeds=(1,), epochs=1, max_length=32, ensemble_tasks=("sst2",))  # fmt: skip
    write_json(folder / "plan.json", plan_of(train, check, folder).model_dump(mode="json"))
    flags = ["--output_dir", str(folder), "--piece", "1h"]
    runs = study.run_folders(folder, plan_of(train, check, folder))

    first = multiprocessing.get_context("fork").Process(target=study.main, args=(flags,))
    first.start()
    until(lambda: any((run / "DONE").exists() for run in runs.values()) or not first.is_alive())
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join()
    before = {run: (run / "DONE").stat().st_mtime_ns for run in runs.values() if (run / "DONE").exists()}
    assert 0 < len(before) < len(runs)
    capsys.readouterr()

    assert study.main(flags) == 0
    said = capsys.readouterr().out
    assert "finished:" in said
    assert all((run / "DONE").stat().st_mtime_ns == at for run, at in before.items())
    results = [folder / name / "results.jsonl" for name in ("results", "ensembles")]
    lines = [line["run_id"] for path in results for line in read_jsonl(path)]
    planned = study.progress(folder, Plan.model_validate(read_json(folder / "plan.json")))["evaluation"][1]
    assert len(lines) == len(set(lines)) == planned  # nothing was run twice
    assert all(record["peak_memory_gb"] > 0.05 for record in Store(folder / "results").records())
    assert not [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt", ".bin")]
    study.main(flags)
    assert [line["run_id"] for path in results for line in read_jsonl(path)] == lines

    page = tmp_path / "docs" / "study.md"
    assert study.main(["page", "--study", str(folder), "--output", str(page)]) == 0
    text = page.read_text()
    for said in ("## Verdict", "### Not seen at this power", "k5 multicls", "Size \"smoke\"", "base cls x5", "Spearman",
                 "61.80", "mtl-2"):  # fmt: skip
        assert said in text, said
    assert "Unfinished" not in text and " nan" not in text
    pictures = {path.name: path.read_bytes() for path in (page.parent / "images").iterdir()}
    assert set(pictures) == {"study_curves.svg", "study_scores.svg"}
    study.main(["page", "--study", str(folder), "--output", str(page)])
    assert page.read_text() == text
    assert {path.name: path.read_bytes() for path in (page.parent / "images").iterdir()} == pictures


# The rules of the page, on invented results.


def results_of(better: float, size: str = "100") -> list[Any]:
    """Two pretrainings x three draws on two tasks; five facets are `better` points above the others, but for noise."""
    draw = random.Random(0)
    rows = []
    for task in ("sst2", "rte"):
        for name in ("base cls", "mlm cls", "mtl cls", "k1 multicls", "k5 multicls"):
            mean = 0.6 + (better / 100 if name == "k5 multicls" else 0)
            scores = [mean + draw.gauss(0, 0.002) for _ in range(3 if name == "base cls" else 6)]
            rows.append(fake_row(task, name, scores, draws=3, pretrainings=len(scores) // 3, size=size))
    return rows


@pytest.mark.parametrize(("better", "verdict"), [(10, "supported"), (-10, "contradicted"), (0, "not seen")])
def test_verdicts_follow_the_corrected_tests(better: float, verdict: str) -> None:
    found = study_page.claim_tests(study_page.all_runs(results_of(better)), by_task=False)
    scores = {one.claim.b: one for one in found if one.claim.measure == "score" and one.claim.a == "k5 multicls"}
    assert scores.keys() == {"mtl cls", "k1 multicls", "mlm cls", "base cls"}
    assert {one.verdict for one in scores.values()} == {verdict}
    assert all(one.corrected >= one.found.p for one in found)
    assert scores["base cls"].found.units.endswith("paired") and "paired" not in scores["mtl cls"].found.units
    assert f"{scores['mtl cls'].found.difference:+.2f} points" in str(scores["mtl cls"])


def test_less_calibration_error_supports_a_claim() -> None:
    runs = study_page.all_runs(results_of(0))
    claim = next(claim for claim in study_page.CLAIMS if claim.measure == "ece")
    errors = [one for one in study_page.claim_tests(runs, by_task=False) if one.claim == claim]
    assert len(errors) == 1
    for sign, verdict in ((-1, "supported"), (1, "contradicted")):
        tested = study_page.replace(errors[0], corrected=0.01,
                                    found=study_page.replace(errors[0].found, difference=sign * 3.0))  # fmt: skip
        assert tested.verdict == verdict


def test_an_average_needs_all_tasks_of_a_run() -> None:
    runs = study_page.all_runs([row for row in results_of(5) if row.system.name == "k5 multicls"])
    whole, less = study_page.average(runs), study_page.average(runs.iloc[1:])
    assert len(whole) == 6 and len(less) == 5
    assert whole["score"].mean() == pytest.approx(runs["score"].mean())
