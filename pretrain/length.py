"""The length of a run: steps from epochs or tokens, and intervals from shares of the run."""

from __future__ import annotations

import math

from data_prep.examples import ExampleStream
from multicls.errors import UserError
from pretrain.settings import PretrainSettings

# Muennighoff et al. 2023 (arXiv:2305.16264): after about 40 passes over the same text a model learns nothing more.
MANY_PASSES = 40
FEW_TOKENS = 50_000  # our own limit: about 16 steps of the paper's batch
INTERVALS = ("log_every", "eval_every", "save_every")


def resolve_length(
    settings: PretrainSettings, stream: ExampleStream
) -> tuple[PretrainSettings, list[str]]:
    """Returns the settings with steps and intervals as numbers of steps, and lines for the log.

    Raises:
        UserError: A pass over the training `stream` has fewer examples than a group of negatives.
    """
    train, examples, tokens = settings.train, stream.examples_per_epoch, stream.num_tokens
    if examples < train.negatives_group:
        raise UserError(
            f"{stream.corpus.path}: too small: its {tokens:,} training tokens give {examples} examples, and a group "
            f"of negatives needs {train.negatives_group} that differ (train.negatives_group). Prepare at least "
            f"{tokens * train.negatives_group // examples + 1:,} tokens, better a million."
        )
    wanted = (train.tokens / tokens or train.epochs) * examples  # in examples
    steps = train.steps or max(1, round(wanted / train.global_batch_size))
    passes = steps * train.global_batch_size / examples
    notes = [
        f"length: {steps:,} steps are {passes:,.2f} passes (epochs) over {tokens:,} training tokens"
    ]
    if passes > MANY_PASSES:
        notes.append(
            f"warning: after about {MANY_PASSES} passes over the same text a model learns nothing more. Shorten the "
            "run, for instance with --epochs 3, or prepare more text."
        )
    if tokens < FEW_TOKENS:
        notes.append(f"warning: {tokens:,} training tokens are too few to improve a model")
    every = {name: getattr(settings.run, name) for name in INTERVALS}
    every = {name: max(1, math.ceil(n * steps - 1e-9)) if n < 1 else n for name, n in every.items()}
    in_steps = {"steps": steps, "tokens": 0.0, "epochs": 0.0}
    return settings.with_values(train=in_steps, run=every), notes
