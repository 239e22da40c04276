"""Isotropy, facets and layers of fine-tuned models: numbers against worked ones, and whole commands."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from finetune.analyze import COMMAND, facets_of, load_analyzed, main, read
from finetune.data.own_rows import read_own
from finetune.data.tasks import Task, find_task
from finetune.settings import FinetuneSettings, OwnDataSettings
from finetune.show import figures, isotropy
from multicls.errors import UserError
from multicls.files import read_json
from tests.finetune.conftest import NOUNS, write_tsv


def embeddings(rows: int = 400, seed: int = 0) -> np.ndarray:
    """Six dimensions of the spreads 3, 2, 1, 1, 1, 1, uncorrelated to the last digit, around a mean far from 0."""
    draw = np.random.default_rng(seed).normal(size=(rows, 6))
    orthonormal = np.linalg.qr(draw - draw.mean(axis=0))[0]
    return np.sqrt(rows) * orthonormal * [3, 2, 1, 1, 1, 1] + 100


def test_explained_variance_of_known_spreads() -> None:
    expected = np.cumsum([9, 4, 1, 1, 1, 1]) / 17
    np.testing.assert_allclose(isotropy.explained_variance(embeddings()), expected)
    np.testing.assert_allclose(isotropy.explained_variance(7 * embeddings() - 30), expected)
    assert np.isnan(isotropy.explained_variance(np.ones((5, 3)))).all()


def test_correlated_dimensions_come_to_lie_side_by_side() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.normal(size=(2, 500, 1))
    mixed = np.hstack([first, second, -first, second, first, np.zeros((500, 1))]) + 0.01 * draw.normal(size=(500, 6))
    mixed[:, 5] = 3.0  # never changes
    matrix, order = isotropy.correlation(mixed)
    groups = ["a" if index in (0, 2, 4) else "b" if index in (1, 3) else "-" for index in order]
    assert sorted(order) == list(range(6)) and "".join(groups) in {"aaabb-", "bbaaa-", "-aaabb", "-bbaaa"}
    same = np.array(groups)[:, None] == np.array(groups)
    assert matrix[same].min() > 0.99 and matrix[~same].max() < 0.2
    reordered = np.abs(np.corrcoef(mixed[:, order[order != 5]].T))
    kept = np.ix_(order != 5, order != 5)
    np.testing.assert_allclose(matrix[kept], reordered, atol=1e-9)


def test_logit_variance_is_that_of_the_projected_logits() -> None:
    h, weight = embeddings(), np.random.default_rng(2).normal(size=(2, 6))
    values, vectors = np.linalg.eigh(np.cov(h.T))
    direction = weight[1] - weight[0]
    expected = (values * (direction @ vectors) ** 2)[::-1]
    shares = isotropy.logit_variance(h, weight)
    np.testing.assert_allclose(shares[:2], (expected / expected.sum())[:2])  # the others have equal eigenvalues
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(isotropy.logit_variance(h, weight + 50.0), shares)  # moves no decision
    assert isotropy.logit_variance(h, np.eye(6)[:1])[0] == pytest.approx(1)  # one output: nothing in common to take out


def test_change_of_a_classifier_is_seen_in_the_top_components_only() -> None:
    h, start = embeddings(), np.array([[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]])
    assert isotropy.classifier_change(h, start, start + [0, 0, 0, 0, 0, 9], components=2) == pytest.approx((1, 0))
    cosine, distance = isotropy.classifier_change(h, start, -start, components=2)
    assert (cosine, distance) == pytest.approx((-1, 2))


def test_reference_classifier_finds_the_direction_that_decides() -> None:
    h = embeddings()
    weight = isotropy.reference_classifier(h, (h[:, 4] > 100).astype(int), is_regression=False)
    assert weight.shape == (1, 6) and np.abs(weight[0]).argmax() == 4
    np.testing.assert_allclose(isotropy.reference_classifier(h, 2 * h[:, 1], True), [[0, 2, 0, 0, 0, 0]], atol=0.01)


def test_similarity_of_equal_and_of_orthogonal_facets() -> None:
    vector = np.random.default_rng(3).normal(size=(7, 1, 5))
    alike = isotropy.facet_similarity(vector * np.array([1.0, 2, 3])[:, None])
    np.testing.assert_allclose(alike, np.ones((3, 3)))
    apart = isotropy.facet_similarity(np.broadcast_to(np.eye(3), (7, 3, 3)))
    assert isotropy.between(alike) == pytest.approx(1) and isotropy.between(apart) == 0


def save_tuned(
    folder: Path,
    checkpoint: Path,
    head: str,
    task: str = "sst2",
    seed: int = 1,
    own: Task | None = None,
    **options: str,
) -> Path:
    """A model as finetune/run.py saves it, its classifiers changed a little, with its line of results."""
    import torch

    from finetune.heads.building import build_head
    from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
    from finetune.heads.saving import save_model
    from finetune.store.results import Store

    found = find_checkpoint(str(checkpoint))
    settings = FinetuneSettings(model=str(checkpoint), task=task, head=head, seed=seed, **options)
    torch.manual_seed(seed)
    names = settings.task_names
    model = build_head(settings, found, [own if own and own.name == name else find_task(name) for name in names])
    with torch.no_grad():
        for weight in model.classifiers.parameters():
            weight.add_(0.001 * torch.randn_like(weight))
    run = folder / "models" / f"run-{head}"
    save_model(model, load_tokenizer(found, 64), run)
    Store(folder).write({"run_id": run.name, "task": "other", "seed": seed}, {})
    return run


def test_figures_and_numbers_of_several_models(
    tiny_bert: Path, tiny_multicls: Path, glue: Path, tmp_path: Path
) -> None:
    multicls = save_tuned(tmp_path, tiny_multicls, "multicls")
    hire = [save_tuned(tmp_path / name, tiny_bert, "hire", name) for name in ("sst2", "stsb")]
    common = ["--data_dir", str(glue), "--examples", "30"]
    out = tmp_path / "a"
    main(["--model", str(multicls), "--before", str(tiny_multicls), "--output_dir", str(out), *common])
    numbers = read_json(out / "analysis.json")["sst2-multicls-run-multicls"]
    assert numbers["facets"].keys() == {"h_k before", "W_k h_k before", "h_k after", "W_k h_k after"}
    before, after = (numbers["facets"][f"h_k {when}"] for when in ("before", "after"))
    np.testing.assert_allclose(before["cosines"], after["cosines"], atol=1e-6)  # only the classifier has changed
    assert after["mean cosine"] == pytest.approx(after["cosines"][0][1], abs=1e-6)
    change = numbers["classifier before and after"]  # drawn again from the run's seed
    assert 0.99 < change["cosine"] < 1 and change["L2 distance"] > 0
    assert numbers["EV1, EV2, EV3"].keys() == {"before", "after", "before, batch norm", "before, IsoBN"}
    assert {"facets.png", "isotropy-sst2-multicls-run-multicls.png"} <= {path.name for path in out.iterdir()}

    main(["--model", *map(str, hire), "--output_dir", str(out), *common])
    numbers = read_json(out / "analysis.json")
    assert numbers.keys() == {"sst2-hire-run-hire", "stsb-hire-run-hire"}
    table = list(csv.DictReader((out / "layers-stsb-hire-run-hire.csv").open()))
    assert len(table) == 30 and [sum(float(row[f"layer {n}"]) for n in range(4)) for row in table] == pytest.approx(
        [1.0] * 30, abs=1e-5
    )
    mean = [np.mean([float(row[f"layer {n}"]) for row in table]) for n in range(4)]
    assert numbers["stsb-hire-run-hire"]["layers"] == pytest.approx(mean, abs=1e-6)
    for name in ("layers.png", "layers-sst2-hire-run-hire.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_a_plain_checkpoint_needs_a_task_and_has_no_classifier(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_bert), "--data_dir", str(glue), "--output_dir", str(tmp_path / "a")]
    with pytest.raises(UserError, match="add --task"):
        main(arguments)
    with pytest.raises(UserError, match="at least 20"):
        main([*arguments, "--examples", "5"])
    assert not (tmp_path / "a").exists()
    main([*arguments, "--task", "sst2", "--examples", "40"])
    (entry,) = read_json(tmp_path / "a" / "analysis.json").values()
    assert entry["logit variance of top 1, 5, 30"].keys() == {"regression"} and "facets" not in entry


def test_a_model_of_another_task_is_refused(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    tuned = save_tuned(tmp_path, tiny_bert, "cls")
    with pytest.raises(UserError, match="fine-tuned on sst2"):
        main(["--model", str(tuned), "--task", "stsb", "--data_dir", str(glue), "--output_dir", str(tmp_path / "a")])


def test_facets_disagree_where_runs_do_or_do_not(
    tiny_multicls: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.run import run
    from finetune.stats.disagreement import compare_disagreement, facet_logits
    from finetune.store.results import Store

    store = Store(tmp_path)

    def runs(head: str, seed: int, save: bool = False) -> Path:
        values = {"model": str(tiny_multicls), "task": "sst2", "head": head, "train_size": 30, "data_dir": str(glue),
                  "output_dir": str(tmp_path), "save_model": save, "seed": seed, "max_length": 24,
                  "train": {"max_steps": 3, "learning_rate": 1e-3}}  # fmt: skip
        return tmp_path / "models" / str(run(FinetuneSettings.model_validate(values))[0]["run_id"])

    tuned = runs("multicls", 1, save=True)
    single = runs("cls", 1, save=True)
    common = ["--data_dir", str(glue), "--output_dir", str(tmp_path / "a"), "--ensemble", "cls", "--model"]
    with pytest.raises(UserError, match="no two runs of it on sst2"):
        main([*common, str(tuned)])
    members = [store.predictions(path.name)["logits"] for path in (single, runs("cls", 2))]
    with pytest.raises(UserError, match="no sum of facets"):
        main([*common, str(single)])
    with pytest.raises(UserError, match="no results folder"):
        main([*common, str(tiny_multicls), "--task", "sst2"])
    assert not (tmp_path / "a").exists()
    main([*common, str(tuned)])
    (entry,) = read_json(tmp_path / "a" / "analysis.json").values()
    ((system, numbers),) = entry["disagreement"].items()
    analyzed = load_analyzed(str(tuned), COMMAND.parse([*common, str(tuned)]))
    assert analyzed.run in store.records()
    found = read(analyzed.states["after"], analyzed.encode(analyzed.data.dev), 0)
    np.testing.assert_allclose(found["logits"], store.predictions(tuned.name)["logits"], atol=1e-5)
    facets = facet_logits(found["facets"].swapaxes(0, 1), analyzed.weights()["after"], found["logits"])
    assert numbers == {"members": 2, "rows": 60} | compare_disagreement(facets, np.stack(members))
    line = f"| {numbers['overlap']:.3g} | 0.2 | {numbers['spearman']:.3g} |"
    assert " cls" in system and line in (tmp_path / "a" / "disagreement.md").read_text()
    assert line in capsys.readouterr().out


def test_choices_spans_several_tasks_and_own_rows(
    tiny_multicls: Path, glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "superglue"
    copa = [{"premise": f"len {NOUNS[i % 6]}", "choice1": "nar los", "choice2": f"ros {NOUNS[i % 5]}", "label": i % 2,
             "question": "cause", "idx": i} for i in range(30)]  # fmt: skip
    wic = [{"word": "gol", "sentence1": f"gol {NOUNS[i % 6]}", "sentence2": "nar gol", "label": i % 3 == 0, "idx": i,
            "start1": 0, "end1": 3, "start2": 4, "end2": 7} for i in range(30)]  # fmt: skip
    for name, rows in (("COPA", copa), ("WiC", wic)):
        for split in ("train", "val"):
            write_tsv(data / name / f"{split}.jsonl", None, [json.dumps(row) for row in rows])
    own = [tmp_path / "mine.csv", tmp_path / "dev.csv"]
    for path, labels in ((own[0], "abc"), (own[1], "abc"), (tmp_path / "other.csv", "abd")):
        write_tsv(path, "ticket,team", [f"len {NOUNS[i % 6]} los,{labels[i % 3]}" for i in range(30)])
    columns = {"text_column": "ticket", "label_column": "team"}  # the model keeps them
    task, _ = read_own(OwnDataSettings(train_file=str(own[0]), dev_file=str(own[1]), **columns))
    files = ["--train_file", str(own[0]), "--dev_file", str(own[1])]
    sequences = {"copa": 60, "wic": 30, "stsb": 30, "own_mine": 30}
    places = {"copa": ["--data_dir", str(data)], "wic": ["--data_dir", str(data)], "own_mine": files,
              "stsb": ["--data_dir", str(glue), "--task", "stsb"]}  # fmt: skip
    monkeypatch.setattr(figures, "isotropy", lambda *arguments: None)  # seconds, and the same for all
    for name, place in places.items():
        head, tasks = ("cln", "sst2,stsb") if name == "stsb" else ("multicls", name)
        tuned = save_tuned(tmp_path / name, tiny_multicls, head, tasks, own=task, pooling="multicls")
        out = tmp_path / f"{name}.out"
        common = ["--model", str(tuned), "--before", str(tiny_multicls), "--output_dir", str(out), "--examples", "30"]
        main([*common, *place])
        entry = read_json(out / "analysis.json")[f"{name}-{head}-run-{head}"]
        assert entry["dev_rows"] == 30 and entry["logit variance of top 1, 5, 30"].keys() == {
            "classifier",
            "regression",
        }
        assert 0.9 < entry["classifier before and after"]["cosine"] < 1 and "h_k after" in entry["facets"]
        analyzed = load_analyzed(str(tuned), COMMAND.parse([*common, *place]))
        found = read(analyzed.states["after"], analyzed.encode(analyzed.data.dev[:30]), analyzed.index)
        assert len(found["facets"]) == sequences[name]
        np.testing.assert_allclose(found["facets"].sum(axis=1), found["pooled"], atol=1e-5)
    for arguments, message in (
        ([], "your own rows; add --train_file"),
        ([*files[:3], str(own[0]).replace("mine", "gone")], "gone.csv"),
        (["--train_file", str(tmp_path / "other.csv")], "other columns or labels"),
        ([*files, "--label_column", "ticket"], "other columns or labels|labels"),
    ):
        with pytest.raises(UserError, match=message):
            main(["--model", str(tmp_path / "own_mine" / "models" / "run-multicls"), *arguments])


@pytest.mark.slow
def test_the_plain_sum_makes_facets_alike_and_the_reparameterised_one_does_not(
    tiny_bert: Path, multicls_data: Path, tmp_path: Path
) -> None:
    """Compares both heads on rows of SST-2, from two draws of new weights. With MiniLM: docs/analysis.md."""
    import torch

    from finetune.run import run
    from finetune.store.results import Store
    from multicls.from_bert import from_bert

    glue, cosines = str(multicls_data / "glue"), {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        start = str(tmp_path / f"hf{seed}")
        for part in from_bert(str(tiny_bert), num_facets=5, facet_layers=[1, 2], report=lambda line: None):
            part.save_pretrained(start)
        for head in ("multicls", "multicls_sum"):
            settings = FinetuneSettings.model_validate(
                {"model": start, "task": "sst2", "head": head, "train_size": 300, "data_dir": glue,
                 "output_dir": str(tmp_path / "results"), "save_model": True, "max_length": 24,
                 "train": {"learning_rate": 3e-3, "epochs": 5, "batch_size": 16, "eval_every": 1000}}
            )  # fmt: skip
            saved = str(Store(settings.output_dir).model_path(run(settings)[0]["run_id"]))
            args = COMMAND.parse(["--model", saved, "--before", start, "--data_dir", glue])
            analyzed = load_analyzed(saved, args)
            rows = analyzed.encode(analyzed.data.dev[:100])
            for when, model in analyzed.states.items():
                found = facets_of(model, read(model, rows, 0)["states"], when)
                cosines[seed, head, when] = found[f"W_k h_k {when}"]["mean cosine"]
        assert cosines[seed, "multicls", "before"] == pytest.approx(cosines[seed, "multicls_sum", "before"])
    before, kept, alike = (
        np.mean([cosines[seed, head, when] for seed in (0, 1)])
        for head, when in (("multicls", "before"), ("multicls", "after"), ("multicls_sum", "after"))
    )
    assert abs(before) < 0.1 and kept < 0.1 and alike > 0.2
