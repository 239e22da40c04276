"""Settings, recipes and flags of pretrain/run.py, and the length of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import REPOSITORY
from pretrain.run import SHORTCUTS, read_settings
from pretrain.settings import (
    PretrainSettings,
    TrainSettings,
    lr_at,
    resolve_length,
)
from pretrain.setup import identity
from pretrain.stopping import StopRequest

RECIPES = sorted((REPOSITORY / "pretrain" / "recipes").glob("*.yaml"))
NEEDED = ["--model", "m", "--corpus", "c"]
BASE = ["--recipe", "base", "--corpus", "c"]


def read(*argv: str) -> PretrainSettings:
    return read_settings(argv)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    settings = read("--recipe", str(recipe), *NEEDED, "--steps", "9")
    assert settings.run.output_dir == f"runs/{recipe.stem}"


PAPER = {
    "model.num_facets": 5,
    "model.facet_layers": [4, 8],
    "model.mcqt_lambda": 0.1,
    "model.hard_negatives": True,
    "data.seq_length": 128,
    "data.mlm_probability": 0.15,
    "train.tokens": 2e9,
    "train.steps": 0,
    "train.global_batch_size": 10,
    "train.negatives_group": 10,
    "train.learning_rate": 2e-5,
    "train.warmup_ratio": 0.001,
    "train.weight_decay": 0.02,
    "train.max_grad_norm": 1.0,
    "objective.anchor": 0.0,
    **{f"objective.{name}": 1.0 for name in ("mlm", "tfidf", "so", "mcqt")},
}


def test_base_is_the_paper_s() -> None:
    groups = read(*BASE).model_dump()
    base = {f"{group}.{name}": groups[group][name] for group in groups for name in groups[group]}
    assert base | PAPER == base


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run.log_every", "1.5"], "--run.log_every 1.5"),
        (["--run.log_every", "0"], "--run.log_every 0"),
        (["--global_batch_size", "64"], "set it to 60"),
        (["--train.lerning_rate", "1"], "'--train.learning_rate'?"),
        (["--data.source_weights", '{"wiki": -1}'], "source_weights"),
        ([f"--objective.{name}=0" for name in ("mlm", "tfidf", "so", "mcqt")], "objective"),
        (["--epochs", "1", "--steps", "9"], "set one of epochs, steps and tokens"),
        (["--model.teacher", "t"], "nothing follows it; set objective.anchor"),
        (["--objective.anchor", "5", "--model.random_weights"], "no embedding to keep"),
    ],
)
def test_wrong_settings_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(*BASE, *flags)
    assert message in str(caught.value)


def test_nothing_set_means_the_sample_on_any_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read("--config", "ds_configs/zero2.json")
    assert (settings.model.checkpoint, settings.data.corpus) == ("sample", "sample")
    assert settings.run.output_dir == "runs/sample" and read("--steps", "3").train.steps == 3
    for ranks, size in ((1, 12), (2, 12), (3, 36), (8, 48)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert read().train.global_batch_size == size
    with pytest.raises(UserError, match="model.checkpoint: required"):
        read("--corpus", "c", "--steps", "9")


def identity_of(
    folder: Path, *flags: str, precision: Any = "fp32", dropout: float = 0.1, **ds_config: Any
) -> dict[str, Any]:
    settings = read("--model", "m", "--corpus", str(folder), "--steps", "9", *flags)
    given = {"zero_optimization": {"stage": 2}} | ds_config
    return identity(settings, given, precision, folder, dropout)


def test_identity_is_what_decides_numbers(tiny_corpus: Path) -> None:
    plain = identity_of(tiny_corpus)
    same = ["--train.skip_nonfinite=3", "--data.num_workers=0", "--train.precision=fp32"]
    same += ["--train.activation_checkpointing", "--micro_batch_size", "10", "--run.save_every=3"]
    same += ["--train.unpad=true", "--train.graph=false"]
    zero = {"stage": 2, "reduce_bucket_size": 1e5}
    assert identity_of(tiny_corpus, *same, zero_optimization=zero, steps_per_print=1) == plain
    others: dict[str, tuple[list[str], dict[str, Any]]] = {
        "model.num_facets": (["--model.num_facets=1"], {}),
        "data.source_weights": (["--data.source_weights", '{"a": 2}'], {}),
        "train.seed": (["--seed", "2"], {}),
        "DeepSpeed's zero_optimization.stage": ([], {"zero_optimization": {"stage": 1}}),
        "DeepSpeed's fp16.initial_scale_power": (
            [],
            {"fp16": {"initial_scale_power": 9, "enabled": "auto"}},
        ),
        "train.precision": ([], {"precision": "bf16"}),
        "dropout of attention (train.unpad)": ([], {"dropout": 0.0}),
        "DeepSpeed's zero_optimization.round_robin_gradients": (
            [],
            {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        ),
    }
    for key, (flags, ds_config) in others.items():
        other = identity_of(tiny_corpus, *flags, **ds_config)
        assert json.loads(json.dumps(other)) == other
        assert {k for k in plain | other if plain.get(k) != other.get(k)} == {key}


GLOBAL, MICRO, LENGTH = "--global_batch_size", "--micro_batch_size", "--data.seq_length"


@pytest.mark.parametrize(
    ("ranks", "flags", "expected"),
    [
        (1, [], (10, 1)),
        (4, [GLOBAL, "80", MICRO, "10"], (10, 2)),
        (2, [GLOBAL, "320"], (80, 2)),  # 80 x 3 x 128 tokens are within the limit
        (2, [GLOBAL, "320", LENGTH, "512"], (20, 8)),
        (1, [GLOBAL, "70", LENGTH, "512"], (10, 7)),
        (4, [GLOBAL, "60"], "4 ranks.* 40"),
        (2, [GLOBAL, "60", MICRO, "20"], "30 examples .* 10, 30"),
    ],
)
def test_micro_batches_share_out_the_batch_within_the_token_limit(
    monkeypatch: pytest.MonkeyPatch, ranks: int, flags: list[str], expected: Any
) -> None:
    """Examples of a micro-batch, and micro-batches that a rank accumulates."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read(*BASE, *flags)
        return
    train = read(*BASE, *flags).train
    assert (train.micro_batch_size, train.passes(ranks)) == expected


def test_no_flag_is_an_abbreviation_for_the_launcher() -> None:
    """The deepspeed launcher also reads abbreviations of its own options after the script's name."""
    from deepspeed.launcher.runner import parse_args

    names = {"config", "status", "recipe", "print_config", *SHORTCUTS, *SHORTCUTS.values()}
    for flag in (f"--{name}" for name in names):
        assert parse_args(["pretrain/run.py", flag, "x"]).user_args == [flag, "x"]


# ---- length

SMALL = ("--train.negatives_group=4", "--global_batch_size=12", "--data.seq_length=32")


def resolved(corpus: Path, *flags: str) -> tuple[PretrainSettings, list[str]]:
    settings = read(*NEEDED, *SMALL, *flags)
    special, weights = SpecialIds(0, 0, 0, 0, (0,) * 5), settings.data.source_weights
    opened = Corpus(corpus)
    stream = ExampleStream(opened, special, seq_length=32, seed=0, source_weights=weights)
    return resolve_length(settings, stream)


def test_epochs_and_tokens_agree(tiny_corpus: Path) -> None:
    corpus = Corpus(tiny_corpus)
    by_epochs, notes = resolved(tiny_corpus, "--epochs", "3")
    (tokens,) = re.findall(r"over ([\d,]+) training tokens", notes[0])
    total = corpus.manifest["tokens"]
    assert 0.9 * total < int(tokens.replace(",", "")) < total  # one document is held out
    assert "too few to improve a model" in notes[1]
    three = str(3 * int(tokens.replace(",", "")))
    by_tokens, _ = resolved(tiny_corpus, "--train.tokens", three)
    assert by_epochs.train.steps == by_tokens.train.steps > 3
    once = resolved(tiny_corpus, "--epochs", "1")[0].train.steps
    assert by_epochs.train.steps == pytest.approx(3 * once, abs=2)
    (source,) = corpus.manifest["sources"]
    twice = ("--data.source_weights", f'{{"{source}": 2}}')
    double = resolved(tiny_corpus, "--epochs", "1", *twice)[0].train.steps
    assert double == pytest.approx(2 * once, abs=1)


def test_intervals_may_be_shares_of_the_run(tiny_corpus: Path) -> None:
    flags = ("--run.log_every=1e-12", "--run.eval_every=0.2", "--run.save_every=7")
    run = resolved(tiny_corpus, "--steps", "31", *flags)[0].run
    assert (run.log_every, run.eval_every, run.save_every) == (1, 7, 7)
    assert "40 passes" in resolved(tiny_corpus, "--train.tokens=2e9")[1][1]
    group = ("--train.negatives_group=3000", "--global_batch_size=3000")
    with pytest.raises(UserError, match="too small"):
        resolved(tiny_corpus, "--steps", "7", *group)


def rates(**train: Any) -> list[float]:
    values = TrainSettings(steps=10, learning_rate=5.0, **train)
    return [lr_at(step, values) for step in range(10)]


def test_learning_rate_rises_stays_and_falls() -> None:
    rise, fall = [1.0, 2.0, 3.0, 4.0, 5.0], [25 / 6, 20 / 6, 15 / 6, 10 / 6, 5 / 6]
    assert rates(warmup_ratio=0.4) == pytest.approx(rise + fall)
    assert rates(warmup_ratio=0)[0] == 5.0, "no warm-up: the first step has the peak"
    assert lr_at(10, TrainSettings(steps=10)) == 0
    assert 0 < rates(warmup_ratio=0.99)[-1] < 5, "a run of warm-up only"


def test_the_time_limit_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stop = StopRequest(time_limit=2)
    now += 119
    assert not any(stop.votes())
    now += 2
    assert any(stop.votes())
