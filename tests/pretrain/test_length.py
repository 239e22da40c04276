"""The length of a run: from tokens, epochs or steps, in words, and what is too long or too small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.errors import UserError
from pretrain.length import RunLength, settle_length
from pretrain.run import parse
from pretrain.settings import PretrainSettings

SMALL = {"train.negatives_group": 4, "train.global_batch_size": 12, "data.seq_length": 32}


@pytest.fixture(scope="module")
def corpus(tiny_corpus: Path) -> Corpus:
    return Corpus.open(tiny_corpus)


def read(*flags: str, **settings: object) -> PretrainSettings:
    given = SMALL | {name.replace("__", "."): value for name, value in settings.items()}
    assignments = [f"--set={name}={value}" for name, value in given.items()]
    return parse(["--model", "m", "--corpus", "c", *assignments, *flags])[1]


def steps(corpus: Corpus, *flags: str, **settings: object) -> int:
    return settle_length(read(*flags, **settings), corpus)[0].train.steps


def training_tokens(corpus: Corpus, fraction: float = 0.01) -> int:
    """Counts the tokens of the training documents one by one."""
    limit = corpus.validation_limit(fraction)
    rows = [corpus.row(number) for number in range(corpus.num_rows)]
    hashes = np.concatenate([corpus.shard(number).hashes for number in range(corpus.num_shards)])
    held_out = (hashes >> np.uint64(11)) * 2.0**-53 < limit
    assert 0 < held_out.sum() < len(rows)
    return sum(len(row.tokens) for row, out in zip(rows, held_out, strict=True) if not out)


def test_tokens_are_steps_whatever_the_seed(corpus: Corpus) -> None:
    one, other = (settle_length(read("--seed", seed, train__tokens=1e6), corpus)[0].train for seed in "12")
    assert one.steps == other.steps and (one.tokens, one.epochs) == (0, 0)
    text = 1e6 / (one.steps * 12 * 3)  # tokens of a part, of at most 32 - 3 - K
    assert 0.7 * 24 < text < 24
    assert steps(corpus, train__tokens=1e6, train__global_batch_size=24) == pytest.approx(one.steps / 2, abs=1)
    assert steps(corpus, "--steps", "7") == 7


def test_an_epoch_is_the_tokens_of_the_training_documents(corpus: Corpus) -> None:
    settings, length = settle_length(read("--epochs", "3"), corpus)
    assert length.training_tokens == training_tokens(corpus)
    assert length.steps == settings.train.steps == steps(corpus, train__tokens=3 * length.training_tokens)
    assert length.passes == pytest.approx(3, rel=0.5 / length.steps)
    assert settings.train.epochs == 0  # a resumed run keeps the steps
    assert settle_length(settings, corpus)[0] == settings
    assert steps(corpus, "--epochs", "1e-9") == 1
    large = settle_length(read("--epochs", "3", data__validation_fraction=0.5), corpus)[1]
    assert large.training_tokens == training_tokens(corpus, 0.5) < length.training_tokens


def test_an_epoch_follows_the_weights_of_sources(corpus: Corpus) -> None:
    source = corpus.row(0).source
    plain, doubled = (
        settle_length(read("--epochs", "2", f"--set=data.source_weights.{source}={weight}"), corpus)[1]
        for weight in (1, 2)
    )
    assert doubled.training_tokens == 2 * plain.training_tokens
    assert doubled.steps == pytest.approx(2 * plain.steps, abs=1)


def test_an_epoch_shows_about_as_much_text_as_there_is(corpus: Corpus) -> None:
    """The examples of an epoch hold as many tokens as the training documents, so that both ways to count agree."""
    special = SpecialIds(cls=0, sep=0, pad=0, mask=0, facets=(0,) * 5)
    stream = ExampleStream(corpus, special, seq_length=32, seed=0)
    length = settle_length(read("--epochs", "1"), corpus)[1]
    assert length.steps * 12 == pytest.approx(stream.examples_per_epoch, rel=0.15)


def test_intervals_may_be_shares_of_the_run(corpus: Corpus) -> None:
    settings = read("--steps", "30", run__log_every=0.02, run__eval_every=0.1, run__save_every=7)
    run = settle_length(settings, corpus)[0].run
    assert (run.log_every, run.eval_every, run.save_every) == (1, 3, 7)
    run = settle_length(read("--steps", "31", run__eval_every=0.2), corpus)[0].run
    assert run.eval_every == 7  # not 6, whose last two validations would be those of steps 30 and 31


def test_length_in_words() -> None:
    assert RunLength(600, 1.9e6, 1_904_000).words() == [
        "length: 1,904,000 training tokens; 600 steps (1,900,000 tokens) are 1.0 passes (epochs) over them"
    ]
    length, warning = RunLength(640_000, 2e9, 1_904_000).words()
    assert "are 1,050 passes (epochs) over them" in length
    assert warning.startswith("warning: 1,050 passes") and "--epochs 3" in warning
    assert not any("warning" in line for line in RunLength(600, 40 * 1e6, 1_000_000).words())
    assert "too few to improve a model" in RunLength(9, 9000, 9000).words()[1]


def test_the_default_length_is_refused_where_it_is_far_too_long(corpus: Corpus) -> None:
    with pytest.raises(UserError, match=r"no length is given, and the default, 2e\+09 tokens, is .* --epochs 3"):
        settle_length(read(), corpus)
    assert settle_length(read("--set=train.tokens=2e9"), corpus)[1].passes > 40  # asked for: a warning says enough


def test_a_corpus_smaller_than_a_group_of_negatives_is_refused(corpus: Corpus) -> None:
    with pytest.raises(
        UserError, match=r"too small: its .* training tokens give .* at the very least, better a million"
    ):
        steps(corpus, "--steps", "7", train__negatives_group=3000, train__global_batch_size=3000)
