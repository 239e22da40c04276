"""Settings, recipes and flags of pretrain/run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.settings import load_settings
from pretrain.job import _identity
from pretrain.run import check_ranks, fit_ranks, parse, read_settings
from pretrain.settings import PretrainSettings, TrainSettings

RECIPES = sorted((Path(__file__).parents[2] / "pretrain" / "recipes").glob("*.yaml"))
NEEDED = ["--model", "m", "--corpus", "c"]


def read(*argv: str) -> PretrainSettings:
    return read_settings(parse(argv))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    settings = read("--recipe", str(recipe), *NEEDED)
    assert settings.run.output_dir == f"runs/{recipe.stem}"


def test_nothing_given_means_the_embedded_default() -> None:
    settings = read()
    assert (settings.model.checkpoint, settings.data.corpus) == ("sample", "sample")
    assert settings.run.output_dir == "runs/sample"


def test_a_corpus_alone_is_not_mixed_with_the_embedded_default() -> None:
    with pytest.raises(UserError, match=r"model\.checkpoint|model: this setting is required"):
        read("--corpus", "c")


def test_precedence_defaults_recipes_flags(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 7, triples: 3}\nmodel: {num_facets: 2}\n")
    (tmp_path / "b.yaml").write_text("train: {triples: 4}\n")
    recipes = ["--recipe", str(tmp_path / "a.yaml"), "--recipe", str(tmp_path / "b.yaml")]
    settings = read(*recipes, *NEEDED, "--set", "model.num_facets=1", "--steps", "9")
    assert (settings.train.steps, settings.train.triples, settings.model.num_facets) == (9, 4, 1)
    assert settings.train.learning_rate == TrainSettings().learning_rate


def test_all_mistakes_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("train: {lerning_rate: 1.0, steps: -1}\ndata: {seq_length: many}\n")
    with pytest.raises(UserError) as caught:
        read("--recipe", str(tmp_path / "bad.yaml"), *NEEDED, "--set", "num_facets=3")
    text = str(caught.value)
    assert "train.learning_rate" in text and "steps = -1" in text and "seq_length = 'many'" in text
    assert "Did you mean 'model.num_facets'?" in text


def test_weights_of_sources() -> None:
    settings = read(*NEEDED, "--set", "data.source_weights.wiki=0.5", "--set", "data.source_weights.books=2")
    assert settings.data.source_weights == {"wiki": 0.5, "books": 2}
    for weight in ("-1", ".inf", "many"):
        with pytest.raises(UserError, match=r"data\.source_weights\.wiki = "):
            read(*NEEDED, "--set", f"data.source_weights.wiki={weight}")


def test_weights_of_sources_belong_to_a_run(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    plain, weighted = (_identity(read(*NEEDED, *flags), tmp_path) for flags in ([], ["--set=data.source_weights.a=2"]))
    assert json.loads(json.dumps(weighted)) == weighted
    assert {key for key in plain if plain[key] != weighted[key]} == {"data.source_weights"}


def test_no_objective_is_refused() -> None:
    weights = [f"--set=objective.{name}=0" for name in ("mlm", "tfidf", "so", "mcqt")]
    with pytest.raises(UserError, match="nothing to train"):
        read(*NEEDED, *weights)


def test_ranks_that_do_not_divide_the_step_are_refused() -> None:
    settings = load_settings(PretrainSettings, [], ["train.micro_batches=6", "model.checkpoint=m", "data.corpus=c"])
    check_ranks(settings, 3)
    with pytest.raises(UserError, match="1 or 2 or 3 or 6"):
        check_ranks(settings, 4)


def test_the_embedded_default_runs_on_any_number_of_ranks() -> None:
    settings = read()
    assert [fit_ranks(settings, n).train.micro_batches for n in (1, 2, 3, 8)] == [2, 2, 6, 8]


def test_no_flag_is_an_abbreviation_for_the_launcher() -> None:
    """The deepspeed launcher also reads abbreviations of its own options behind the script's name."""
    from deepspeed.launcher.runner import parse_args

    for flag in ("--recipe", "--set", "--model", "--corpus", "--output_dir", "--steps", "--micro_batches", "--seed"):
        known = parse_args(["pretrain/run.py", flag, "x"])
        assert known.user_args == [flag, "x"]
