"""Settings, recipes and flags of pretrain/run.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multicls import MultiClsBertConfig
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.settings import load_settings
from multicls.shards import Corpus
from pretrain.job import _identity, settle_steps
from pretrain.run import check_ranks, fit_ranks, parse, read_settings
from pretrain.settings import PretrainSettings, TrainSettings

RECIPES = sorted((REPOSITORY / "pretrain" / "recipes").glob("*.yaml"))
NEEDED = ["--model", "m", "--corpus", "c"]


def read(*argv: str) -> PretrainSettings:
    return read_settings(parse(argv))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    settings = read("--recipe", str(recipe), *NEEDED)
    assert settings.run.output_dir == f"runs/{recipe.stem}"


PAPER = {"model.num_facets": 5, "model.mcqt_lambda": 0.1, "model.hard_negatives": True, "data.seq_length": 128}
PAPER |= {"train.learning_rate": 2e-5, "train.warmup_fraction": 0.001, "train.weight_decay": 0.02}
PAPER |= {"train.gradient_clipping": 1.0, "train.steps": 0, "data.mlm_probability": 0.15}
PAPER |= {f"objective.{name}": 1.0 for name in ("mlm", "tfidf", "so", "mcqt")}
BASE = PAPER | {"model.facet_layers": [4, 8], "train.triples": 10, "train.tokens": 2e9}
LARGE = PAPER | {"model.facet_layers": [8, 16], "train.triples": 16, "train.tokens": 1e9}
SINGLE_CLS = {"model.num_facets": 0, "model.facet_layers": []}
CLAIMS = {  # recipe -> what it changes of base
    "mtl": SINGLE_CLS | {"model.hard_negatives": False, "train.triples": 15},
    "k1": {"model.num_facets": 1},
    "lambda0": {"model.mcqt_lambda": 0.0},
    "lambda05": {"model.mcqt_lambda": 0.5},
    "lambda1": {"model.mcqt_lambda": 1.0},
    "no_hard_negative": {"model.hard_negatives": False, "train.triples": 15},
    "no_facet_layers": {"model.facet_layers": []},
    "mlm_only": SINGLE_CLS | {f"objective.{name}": 0.0 for name in ("tfidf", "so", "mcqt")},
}


def flat(settings: PretrainSettings) -> dict[str, object]:
    groups = settings.model_dump(exclude={"run"}).items()
    return {f"{group}.{name}": value for group, fields in groups for name, value in fields.items()}


@pytest.mark.parametrize(("recipe", "settings"), [("base", BASE), ("large", LARGE)])
def test_recipes_of_the_paper(recipe: str, settings: dict[str, object]) -> None:
    found = flat(read("--recipe", f"pretrain/recipes/{recipe}.yaml", "--corpus", "c"))
    assert found["model.checkpoint"] == f"bert-{recipe}-uncased"
    assert {name: found[name] for name in settings} == settings


@pytest.mark.parametrize("recipe", ["base", "large"])
def test_every_field_of_the_paper_s_recipes_is_there_with_a_comment(recipe: str) -> None:
    lines = (REPOSITORY / "pretrain" / "recipes" / f"{recipe}.yaml").read_text().splitlines()
    fields = [line for line in lines if re.match(r"  \w+:", line)]
    assert all(re.search(r" #\s", line) for line in fields)
    names = {line.split(":")[0].strip() for line in fields}
    assert {name.rpartition(".")[2] for name in flat(read(*NEEDED))} - names == {"corpus"}


@pytest.mark.parametrize("recipe", CLAIMS)
def test_an_ablation_changes_of_base_what_it_claims(recipe: str) -> None:
    base, ablation = (f"pretrain/recipes/{name}.yaml" for name in ("base", recipe))
    plain = read("--recipe", base, "--corpus", "c")
    changed = read("--recipe", base, "--recipe", ablation, "--corpus", "c")
    before, after = flat(plain), flat(changed)
    assert {name: after[name] for name in after if after[name] != before[name]} == CLAIMS[recipe]
    model = changed.model.model_dump(exclude={"checkpoint", "random_weights"})
    config = MultiClsBertConfig(**model)  # refuses what does not go together
    assert config.num_parts * changed.train.triples == 30


def test_length_in_tokens_or_in_steps(tiny_corpus: Path) -> None:
    assert (read(*NEEDED).train.tokens, read(*NEEDED).train.steps) == (2e9, 0)
    base = ["--recipe", "pretrain/recipes/base.yaml", "--corpus", "c"]
    assert (read(*base, "--steps", "9").train.tokens, read(*base, "--steps", "9").train.steps) == (0, 9)
    for both in (["train.steps=9"], ["train.tokens=0"], ["train.tokens=0", "train.steps=0"]):
        with pytest.raises(UserError, match="either train.tokens or train.steps"):
            read(*base, *(f"--set={assignment}" for assignment in both))
    corpus = Corpus.open(tiny_corpus)
    tiny = ["train.triples=4", "train.micro_batches=3", "data.seq_length=32", "train.tokens=1e6"]
    one, other = (
        settle_steps(read(*NEEDED, f"--seed={seed}", *(f"--set={item}" for item in tiny)), corpus).train
        for seed in (1, 2)
    )
    assert (one.steps, one.tokens) == (other.steps, 0)
    text = 1e6 / (one.steps * 4 * 3 * 3)  # pieces of a part, of at most 32 - 3 - K
    assert 0.7 * 24 < text < 24
    doubled = read(*NEEDED, *(f"--set={item}" for item in tiny), "--set=train.micro_batches=6")
    assert settle_steps(doubled, corpus).train.steps == pytest.approx(one.steps / 2, abs=1)
    assert settle_steps(read(*NEEDED, "--steps", "7"), corpus).train.steps == 7


def test_what_changes_no_number_may_change_on_resume(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    other = ["--set=train.skip_nonfinite=3", "--set=train.activation_checkpointing=true", "--set=data.num_workers=0"]
    assert _identity(read(*NEEDED), tmp_path, 1) == _identity(read(*NEEDED, *other), tmp_path, 2)
    gathered = read(*NEEDED, "--set=train.gather_negatives=true")
    one, two = (_identity(gathered, tmp_path, ranks) for ranks in (1, 2))
    assert {key for key in one if one[key] != two[key]} == {"number of ranks (train.gather_negatives)"}


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
    plain, weighted = (
        _identity(read(*NEEDED, *flags), tmp_path, 1) for flags in ([], ["--set=data.source_weights.a=2"])
    )
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
