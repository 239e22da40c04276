"""Model cards: README.md of a saved model, with metadata that the Hub reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multicls.cards import (
    METHOD,
    PAPERS,
    TRANSFORMERS,
    cell,
    inherited_metadata,
    model_link,
)

if TYPE_CHECKING:
    from finetune.results import Predictions, Record
    from finetune.settings import RunSettings
    from finetune.subsets import TaskRows
    from finetune.tasks import Array, Task

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    record: Record, rows: Sequence[TaskRows], settings: RunSettings, predictions: Predictions
) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata."""
    from huggingface_hub import ModelCard, ModelCardData

    inherited, task = inherited_metadata(settings.model), rows[0].task
    pipeline = task.shape == "texts"
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if pipeline else None,
        "tags": ["text-classification"],
        "datasets": sorted({own.task.hub[0] for own in rows if own.task.hub}),
        **inherited,
    }
    papers = [METHOD] * (METHOD in settings.head + settings.pooling) + [settings.head]
    card = ModelCard.from_template(
        ModelCardData(**{name: value for name, value in metadata.items() if value}),
        template_path=str(TEMPLATE),
        cell=cell,
        start=model_link(inherited),
        record=record,
        task=task,
        pipeline=pipeline,
        intervals=[_interval(own.task, predictions[f"{own.task.name}/dev"]) for own in rows],
        train=settings.train,
        settings=settings,
        license=inherited.get("license_name") or inherited.get("license"),
        transformers=TRANSFORMERS,
        citations=[PAPERS[name] for name in dict.fromkeys(papers) if name in PAPERS],
    )
    return str(card)


def _interval(task: Task, predictions: Mapping[str, Array]) -> str:
    """Returns the interval of the main score on dev as words, "" if there is none."""
    from finetune.estimates import example_interval

    low, high = example_interval(task, predictions)
    return "" if math.isnan(low) else f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
