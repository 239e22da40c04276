"""Settings, recipes and flags of pretrain/run.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multicls import MultiClsBertConfig
from multicls.errors import UserError
from multicls.files import REPOSITORY
from pretrain.job import identity
from pretrain.run import COMMAND, fit_ranks, parse, recipe_settings
from pretrain.settings import RENAMED, PretrainSettings, TrainSettings, batch_arithmetic, settle_micro_batch

RECIPES = sorted((REPOSITORY / "pretrain" / "recipes").glob("*.yaml"))
NEEDED = ["--model", "m", "--corpus", "c"]


def read(*argv: str) -> PretrainSettings:
    return parse(argv)[1]


def recipe_of(*argv: str) -> TrainSettings | None:
    options, _, flags = parse(argv)
    return recipe_settings(options, flags)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    settings = read("--recipe", str(recipe), *NEEDED)
    assert settings.run.output_dir == f"runs/{recipe.stem}"


PAPER = {"model.num_facets": 5, "model.mcqt_lambda": 0.1, "model.hard_negatives": True, "data.seq_length": 128}
PAPER |= {"train.learning_rate": 2e-5, "train.warmup_ratio": 0.001, "train.weight_decay": 0.02}
PAPER |= {"train.max_grad_norm": 1.0, "train.steps": 0, "data.mlm_probability": 0.15}
PAPER |= {f"objective.{name}": 1.0 for name in ("mlm", "tfidf", "so", "mcqt")}
BASE = PAPER | {"model.facet_layers": [4, 8], "train.tokens": 2e9}
BASE |= dict.fromkeys(("train.global_batch_size", "train.negatives_group"), 10)
LARGE = PAPER | {"model.facet_layers": [8, 16], "train.tokens": 1e9}
LARGE |= dict.fromkeys(("train.global_batch_size", "train.negatives_group"), 16)
PAIRS = {"model.hard_negatives": False, "train.global_batch_size": 15, "train.negatives_group": 15}
SINGLE_CLS = {"model.num_facets": 0, "model.facet_layers": []}
CLAIMS = {  # recipe -> what it changes of base
    "mtl": SINGLE_CLS | PAIRS,
    "k1": {"model.num_facets": 1},
    "lambda0": {"model.mcqt_lambda": 0.0},
    "lambda05": {"model.mcqt_lambda": 0.5},
    "lambda1": {"model.mcqt_lambda": 1.0},
    "no_hard_negative": PAIRS,
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
    assert config.num_parts * changed.train.global_batch_size == 30


def test_one_of_tokens_epochs_and_steps_tells_the_length() -> None:
    def length(*argv: str) -> tuple[float, ...]:
        train = read(*argv).train
        return train.tokens, train.epochs, train.steps

    base = ["--recipe", "pretrain/recipes/base.yaml", "--corpus", "c"]
    assert length(*NEEDED) == length(*base) == (2e9, 0, 0)
    assert length(*base, "--steps", "9") == (0, 0, 9)
    assert length(*base, "--epochs", "0.5") == (0, 0.5, 0)
    assert length(*NEEDED, "--set=train.epochs=2") == (0, 2, 0)
    for wrong in (["train.steps=9"], ["train.epochs=1"], ["train.tokens=0"], ["train.tokens=0", "train.steps=0"]):
        with pytest.raises(UserError, match=r"one of train.tokens, train.epochs and train.steps"):
            read(*base, *(f"--set={assignment}" for assignment in wrong))
    with pytest.raises(UserError, match=r"one of train.tokens, train.epochs and train.steps"):
        read(*base, "--epochs", "1", "--steps", "9")


def test_intervals_are_steps_or_shares() -> None:
    run = read(*NEEDED, "--set=run.eval_every=0.1", "--set=run.save_every=7").run
    assert (run.eval_every, run.save_every, run.log_every) == (0.1, 7, 50)
    for wrong in ("0", "-1", "1.5"):
        with pytest.raises(UserError, match=rf"run\.log_every = {wrong}"):
            read(*NEEDED, f"--set=run.log_every={wrong}")


@pytest.fixture
def corpus_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags for which an identity can be made without a checkpoint."""
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr("pretrain.job.checkpoint_fingerprint", lambda checkpoint, weights: f"{checkpoint}{weights}")
    monkeypatch.setattr("pretrain.job.load_config", lambda checkpoint: None)
    return ["--model", "m", "--corpus", str(tmp_path)]


def test_what_changes_no_number_may_change_on_resume(corpus_flags: list[str]) -> None:
    other = ["--set=train.skip_nonfinite=3", "--set=train.activation_checkpointing=true", "--set=data.num_workers=0"]
    other += ["--micro_batch_size", "10", "--set=train.unpad=true"]
    other += ["--set=train.precision=fp32", "--set=data.warm_up=true"]  # what "auto" is on a CPU
    assert identity(read(*corpus_flags), 1) == identity(read(*corpus_flags, *other), 2)
    gathered = read(*corpus_flags, "--set=train.gather_negatives=true")
    gathered = settle_micro_batch(gathered, 1)
    one, two = (identity(gathered, ranks) for ranks in (1, 2))
    assert {key for key in one if one[key] != two[key]} == {"number of ranks (train.gather_negatives)"}
    other_model = identity(read(*corpus_flags, "--set=model.random_weights=true"), 1)
    plain = identity(read(*corpus_flags), 1)
    assert {key for key in plain if plain[key] != other_model[key]} == {
        "model.random_weights",
        "fingerprint of model.checkpoint",
    }


def test_nothing_given_means_the_embedded_default() -> None:
    settings = read()
    assert (settings.model.checkpoint, settings.data.corpus) == ("sample", "sample")
    assert settings.run.output_dir == "runs/sample"


def test_a_corpus_alone_is_not_mixed_with_the_embedded_default() -> None:
    with pytest.raises(UserError, match="--model: missing; give the Hub id or folder of a BERT checkpoint"):
        read("--corpus", "c")


def test_precedence_defaults_recipes_flags(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 7, weight_decay: 0.3}\nmodel: {num_facets: 2}\n")
    (tmp_path / "b.yaml").write_text("train: {weight_decay: 0.4}\n")
    recipes = ["--recipe", str(tmp_path / "a.yaml"), "--recipe", str(tmp_path / "b.yaml")]
    settings = read(*recipes, *NEEDED, "--set", "model.num_facets=1", "--steps", "9")
    assert (settings.train.steps, settings.train.weight_decay, settings.model.num_facets) == (9, 0.4, 1)
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


def test_weights_of_sources_belong_to_a_run(corpus_flags: list[str]) -> None:
    plain, weighted = (identity(read(*corpus_flags, *flags), 1) for flags in ([], ["--set=data.source_weights.a=2"]))
    assert json.loads(json.dumps(weighted)) == weighted
    assert {key for key in plain if plain[key] != weighted[key]} == {"data.source_weights"}


def test_recipe_without_flags_tells_what_a_batch_departs_from() -> None:
    base = ["--recipe", "pretrain/recipes/base.yaml", "--corpus", "c"]
    recipe = recipe_of(*base, "--global_batch_size", "640", "--set=model.num_facets=3", "--set=train.seed=7")
    assert recipe is not None and (recipe.global_batch_size, recipe.seed) == (10, 1)
    assert recipe_of(*NEEDED) is None
    assert recipe_of(*base, "--set=train.tokens=0", "--steps", "5") is not None


def test_no_objective_is_refused() -> None:
    weights = [f"--set=objective.{name}=0" for name in ("mlm", "tfidf", "so", "mcqt")]
    with pytest.raises(UserError, match="nothing to train"):
        read(*NEEDED, *weights)


def batch(ranks: int, *flags: str) -> tuple[int, int]:
    """Returns examples of a micro-batch, and micro-batches that a rank accumulates."""
    arithmetic = batch_arithmetic(read(*NEEDED, *flags), ranks)
    return arithmetic["micro_batch_size"], arithmetic["accumulation"]


def test_micro_batches_are_as_large_as_the_token_budget_allows() -> None:
    """A group of 10 examples has 3,840 tokens."""
    assert batch(1) == (10, 1)
    assert batch(1, "--global_batch_size", "80") == (80, 1)
    assert batch(2, "--global_batch_size", "80") == (40, 1)
    assert batch(1, "--global_batch_size", "160") == (80, 2)  # 160 examples are 61,440 tokens
    assert batch(1, "--global_batch_size", "160", "--set=train.micro_batch_tokens=16000") == (40, 4)
    assert batch(1, "--global_batch_size", "110") == (10, 11)  # 11 groups have no divisor that fits
    assert batch(1, "--set=train.micro_batch_tokens=100") == (10, 1)  # a group cannot be divided
    assert batch(4, "--global_batch_size", "80", "--micro_batch_size", "10") == (10, 2)


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    assert batch(3, "--global_batch_size", "60") == (20, 1)
    with pytest.raises(UserError, match=r"1 or 2 or 3 or 6 rank.*--global_batch_size a multiple of 40"):
        batch(4, "--global_batch_size", "60")
    with pytest.raises(UserError, match="does not divide a rank's 30 examples .* one of 10, 30"):
        batch(2, "--global_batch_size", "60", "--micro_batch_size", "20")
    with pytest.raises(UserError, match=r"train.global_batch_size = 64 is no multiple .* give 60"):
        read(*NEEDED, "--global_batch_size", "64")


def test_groups_that_are_no_groups_and_settings_that_exclude_each_other() -> None:
    with pytest.raises(UserError, match="train = 5"):
        read(*NEEDED, "--set=train=5")
    with pytest.raises(UserError, match="train.compile and train.unpad do not go together"):
        read(*NEEDED, "--set=train.compile=true", "--set=train.unpad=true")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_say_the_new_ones(old: str, new: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"train.{old} is now {new}")):
        read(*NEEDED, f"--set=train.{old}=1")


def test_the_embedded_default_runs_on_any_number_of_ranks() -> None:
    settings = read()
    assert [fit_ranks(settings, n).train.global_batch_size for n in (1, 2, 3, 8)] == [6, 6, 18, 24]


def test_no_flag_is_an_abbreviation_for_the_launcher() -> None:
    """The deepspeed launcher also reads abbreviations of its own options after the script's name."""
    from deepspeed.launcher.runner import parse_args

    flags = [f"--{flag}" for flag in COMMAND.flags]
    assert {"--recipe", "--output_dir", "--global_batch_size", "--dry_run"} <= {*flags}
    for flag in [*flags, *(flag[:2] + flag[2:].replace("_", "-") for flag in flags)]:
        assert parse_args(["pretrain/run.py", flag, "x"]).user_args == [flag, "x"]
