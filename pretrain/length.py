"""How long a run is: steps from epochs or tokens, intervals from shares of the run, and all of it in words."""

from __future__ import annotations

import math
from typing import NamedTuple

from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.errors import UserError
from pretrain.settings import LENGTHS, PretrainSettings

# Muennighoff et al. 2023 (arXiv:2305.16264): repeated text is worth about as much as new text for 4 passes, and after
# about 40 passes nothing. Measured on language models that predict the next token.
MANY_PASSES = 40
FEW_TOKENS = 50_000  # our own limit: about 16 steps of the paper's batch
SHORTER = "--epochs 3 or --recipe pretrain/recipes/own_text.yaml"


class RunLength(NamedTuple):
    """The length of a run in optimizer steps and tokens of text, without padding and special tokens."""

    steps: int
    tokens: float  # in all steps
    training_tokens: int  # in one pass (epoch) over the training documents, weighted by `data.source_weights`

    @property
    def passes(self) -> float:
        """Passes (epochs) over the training documents."""
        return self.tokens / self.training_tokens

    def words(self) -> list[str]:
        """Returns lines for the log: the length, and a warning if the run repeats the text too often."""
        passes = f"{self.passes:,.{0 if self.passes >= 10 else 1 if self.passes >= 0.1 else 3}f}"
        lines = [
            f"length: {self.training_tokens:,} training tokens; {self.steps:,} steps ({self.tokens:,.0f} tokens) are "
            f"{passes} passes (epochs) over them"
        ]
        if self.passes > MANY_PASSES:
            lines.append(
                f"warning: {passes} passes over the same text; after about {MANY_PASSES} a model learns nothing more "
                f"from it. Shorten the run with {SHORTER}, or prepare more text."
            )
        if self.training_tokens < FEW_TOKENS:
            lines.append(
                f"warning: {self.training_tokens:,} training tokens are too few to improve a model; they show that the "
                f"pipeline works. Prepare at least {FEW_TOKENS:,}, better a million."
            )
        return lines


def settle_length(settings: PretrainSettings, corpus: Corpus) -> tuple[PretrainSettings, RunLength]:
    """Returns the settings with steps and intervals as numbers of steps, and the length of the run.

    Raises:
        UserError: A pass has fewer examples than a group of negatives; or no length was given, and the default is more
            than 40 passes.
    """
    data, train = settings.data, settings.train
    stream = ExampleStream(
        corpus,
        SpecialIds(cls=0, sep=0, pad=0, mask=0, facets=(0,) * settings.model.num_facets),  # only their number matters
        seq_length=data.seq_length,
        seed=0,
        validation_fraction=data.validation_fraction,
        num_parts=settings.model.num_parts,
        source_weights=data.source_weights,
    )
    if stream.examples_per_epoch < train.negatives_group:
        needed = stream.num_tokens * train.negatives_group // stream.examples_per_epoch + 1
        raise UserError(
            f"{corpus.path}: too small: its {stream.num_tokens:,} training tokens give {stream.examples_per_epoch} "
            f"examples, and a group of negatives needs {train.negatives_group} that differ (train.negatives_group). "
            f"Prepare more text: {needed:,} tokens at the very least, better a million."
        )
    per_step = _tokens_of_an_example(stream) * train.global_batch_size
    asked = train.tokens or train.epochs * stream.num_tokens
    steps = train.steps or max(1, round(asked / per_step))
    length = RunLength(steps, steps * per_step, stream.num_tokens)
    if length.passes > MANY_PASSES and train.model_fields_set.isdisjoint(LENGTHS):
        raise UserError(
            f"no length is given, and the default, {train.tokens:g} tokens, is {length.passes:,.0f} passes over the "
            f"{length.training_tokens:,} training tokens of {corpus.path}. Give {SHORTER}, or --steps N."
        )
    intervals = {name: getattr(settings.run, name) for name in ("log_every", "eval_every", "save_every")}
    intervals = {name: math.ceil(n * steps - 1e-9) if n < 1 else n for name, n in intervals.items()}
    in_steps = train.model_copy(update={"steps": steps, "tokens": 0.0, "epochs": 0.0})
    return settings.model_copy(update={"train": in_steps, "run": settings.run.model_copy(update=intervals)}), length


def _tokens_of_an_example(stream: ExampleStream) -> float:
    """Returns the mean tokens of text in an example by the first 4,096: equal for all seeds and numbers of ranks."""
    arrays = stream.micro_batches(range(8), 512)
    parts = arrays["so_labels"]
    special = parts.size * (2 + len(stream.special.facets)) + (parts >= 0).sum()  # [CLS], facets, [SEP] of a segment
    return float(arrays["attention_mask"].sum() - special) / parts.size * stream.num_parts
