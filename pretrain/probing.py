"""Shows during pretraining whether it helps: a probe of the embeddings on labelled rows, or next-passage recall.

Each validation embeds the same rows and compares each embedding with the mean over tokens at step 0, which is what one
has without pretraining. Without labels the rows are passages of held-out documents.
"""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from multicls.corpus import Corpus
from multicls.distributed import on_rank_0
from multicls.files import atomic_write, read_json
from multicls.labels import LabelType, read_labelled
from multicls.modeling_multicls import TopicTable
from multicls.passages import next_passage_hits, passages_of, recall_interval
from multicls.probe import (
    DRAWS,
    MEASURES,
    VIEWS,
    Array,
    Difference,
    Draws,
    draw_rows,
    embed,
    interval,
    targets_of,
)
from multicls.probe import probe as probe_rows
from pretrain.run_folder import BEST
from pretrain.settings import PretrainSettings

BASELINE = "probe.npz"  # in the run folder: the values of step 0
SHARE = 0.045  # of the arithmetic of a run that the forward passes of all probes may take
FEWEST_ROWS = 300  # with labels, taken in a short run, too: fewer choose the wrong step
FEWEST_DRAWS = 10
FEWEST_PASSAGES, SHORT_RUN_PASSAGES = 20, 100
PER_DOCUMENT = 4  # passages, so that few passages come from many documents
FALLS = 3  # validations in a row that are a warning
ADVICE = (
    "Use fewer --steps or a lower --learning_rate, set --objective.mlm and --objective.tfidf to 0.1 or 0 where the "
    "checkpoint has no MLM head, or export an earlier step."
)


@dataclass(eq=False)
class TrainingProbe:
    """Probes the embeddings of a run on the same rows at each validation.

    Attributes:
        texts: The rows, each a text or a pair of texts.
        draws: Labels and draws of the rows; None: the rows are passages of `documents`.
        documents: (N,) number of each passage's document.
        notes: Lines for the log.
        keeps_best: The export is of the best step, not of the last.
        best_step: Step of the best value so far; 0: none was better than step 0.
        best_view: The embedding that has the best value; `best_change` is its change at that step.
    """

    run_folder: Path
    tokenizer: Any
    max_length: int
    texts: list[Any]
    draws: Draws | None
    documents: Array | None
    notes: list[str]
    unpad: bool = False
    topics: TopicTable | None = None
    keeps_best: bool = False
    best_step: int = 0
    best_view: str = ""
    best_change: Difference | None = None
    best_value: float = -math.inf
    seconds: float = 0.0
    history: list[float] = field(default_factory=list)
    first: dict[str, Array] = field(default_factory=dict)
    last: dict[str, Difference] = field(default_factory=dict)
    scores: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Name of the measure, for people."""
        if self.draws is None:
            return "next-passage recall"
        return f"probe ({MEASURES[self.draws.kind]} with {self.draws.train_rows} rows)"

    @property
    def view(self) -> str:
        """Name of the embedding to take from the export; "" before the first validation."""
        if self.keeps_best:
            return self.best_view
        return max(self.scores, key=lambda name: self.scores[name][1], default="")

    @property
    def best(self) -> dict[str, Any]:
        """What best.json holds."""
        assert self.best_change is not None
        change = asdict(self.best_change)
        names = {"step": self.best_step, "value": self.best_value, "view": self.best_view}
        return names | {"change": change}

    def continues(self) -> bool:
        """True if step 0 of the run folder was measured on as many rows and draws."""
        path = self.run_folder / BASELINE
        if not path.exists():
            return False
        rows = (
            (self.documents[:-1] == self.documents[1:]).sum() if self.documents is not None else 0
        )
        shape = (rows,) if self.draws is None else (len(self.draws.train), len(self.texts))
        with np.load(path, allow_pickle=False) as saved:
            return bool(saved["mean"].shape == shape)

    def measure(self, engine: Any, step: int) -> tuple[dict[str, float], bool]:
        """Returns the metrics at `step`, and whether they are the best so far. All ranks call it."""
        begun = time.perf_counter()
        config = engine.module.config
        engine.eval()
        # Layers that are compiled for one length of the sequences would compile for each length of the rows.
        torch.compiler.set_stance("force_eager")
        if self.topics:
            self.topics.to(engine.device)

        def encode(**inputs: Any) -> Any:
            outputs = engine(**inputs, objectives=(), unpad=self.unpad)
            if self.topics:
                outputs.topics = self.topics(inputs["input_ids"], inputs["attention_mask"])
            return outputs

        views = embed(
            encode,
            self.tokenizer,
            self.texts,
            max_length=self.max_length,
            num_facets=config.num_facets,
            device=torch.device(engine.device),
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
        )
        torch.compiler.set_stance("default")
        engine.train()
        found: tuple[dict[str, float], bool] = on_rank_0(lambda: self._compare(views, step))
        self.seconds += time.perf_counter() - begun
        return found

    def _compare(self, views: dict[str, Array], step: int) -> tuple[dict[str, float], bool]:
        """Returns what `measure` does, on rank 0."""
        values = {name: self._values(views[name]) for name in VIEWS if name in views}
        path = self.run_folder / BASELINE
        if step == 0:
            with atomic_write(path, "wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]
        if not self.first:
            with np.load(path, allow_pickle=False) as saved:
                self.first = dict(saved)
            if step > 0:
                self._remember_best()
        metrics: dict[str, float] = {}
        for name, measured in values.items():
            score = float(np.nanmean(measured))
            change = self._difference(measured, self.first["mean"])
            self.scores[name] = float(np.nanmean(self.first[name])), score
            self.last[name] = change
            metrics[f"probe/{name}"] = score
            metrics[f"probe/{name}_change"] = change.mean
            metrics[f"probe/{name}_change_low"] = change.low
            metrics[f"probe/{name}_change_high"] = change.high
        view = max(values, key=lambda name: metrics[f"probe/{name}"])
        value = metrics[f"probe/{view}"]
        self.history.append(value)
        is_best = value > self.best_value
        if is_best:
            self.best_value, self.best_step = value, step
            self.best_view, self.best_change = view, self.last[view]
        return metrics, is_best and step > 0

    def _remember_best(self) -> None:
        """Takes the best of the run before it was resumed: from best.json, or else step 0."""
        path = self.run_folder / BEST
        if path.exists():
            best = read_json(path)
            self.best_step, self.best_value = best["step"], best["value"]
            self.best_view, self.best_change = best["view"], Difference(**best["change"])
            return
        means = {name: float(np.nanmean(first)) for name, first in self.first.items()}
        self.best_view = max(means, key=means.__getitem__)
        self.best_value = means[self.best_view]
        self.best_change = self._difference(self.first[self.best_view], self.first["mean"])

    def _values(self, features: Array) -> Array:
        features = np.nan_to_num(features, posinf=0.0, neginf=0.0)  # of weights that are not finite
        if self.draws is not None:
            return probe_rows(features, self.draws)
        assert self.documents is not None
        return next_passage_hits(features, self.documents)

    def _difference(self, values: Array, reference: Array) -> Difference:
        if self.draws is not None:
            return interval(values, reference)
        assert self.documents is not None
        return recall_interval(values, reference, self.documents)

    def warnings(self) -> list[str]:
        """Returns warnings after a validation; none if the embeddings do not get worse."""
        recent = self.history[-FALLS - 1 :]
        if len(recent) > FALLS and all(a > b for a, b in zip(recent, recent[1:], strict=False)):
            values = ", ".join(f"{100 * value:.1f}" for value in recent)
            return [f"the {self.what} fell {FALLS} times in a row ({values}). {ADVICE}"]
        return []

    def summary(self) -> list[str]:
        """Returns lines for the end of a run: before and after, and which embedding to take."""
        lines = []
        for name, (before, after) in self.scores.items():
            change = self.last[name]
            lines.append(
                f"{self.what}, {name}: {100 * before:.1f} -> {100 * after:.1f}; against the mean at step 0 "
                f"{100 * change.mean:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"
            )
        taken = self.best_change if self.keeps_best else self.last[self.view]
        assert taken is not None
        lines.append(
            f"the best embedding is {self.view}; the best step was {self.best_step}; "
            f"measuring took {self.seconds:.0f} s"
        )
        if taken.high < 0:
            lines.append(f"warning: the run made the embeddings worse. {ADVICE}")
        elif taken.low <= 0:
            lines.append("no gain is shown: the interval of the best embedding holds 0")
        return lines


def choose_rows(kind: LabelType, targets: Array, most: int) -> Array:
    """Returns the indices of at most `most` rows, at random but always the same, with two of each class at least."""
    order = np.random.default_rng(0).permutation(len(targets))
    chosen = set(order[:most].tolist())
    for name in np.unique(targets) if kind == "class" else ():
        chosen |= set(order[targets[order] == name][:2].tolist())
    return np.array(sorted(chosen))


def build_probe(
    settings: PretrainSettings, corpus: Corpus, tokenizer: Any, run_folder: Path
) -> TrainingProbe | None:
    """Returns the probe of a run, or None where held-out documents have no two passages.

    The number of rows follows from the arithmetic of the run: with more than 300 labelled rows or 100 passages, the
    forward passes of all probes take at most 4.5 % of it.

    Args:
        settings: With steps and intervals as numbers.

    Raises:
        multicls.errors.UserError: The probe file cannot be read, or its rows do not make a probe.
    """
    train, run, length = settings.train, settings.run, settings.data.seq_length
    validations = 1 + math.ceil(train.steps / run.eval_every)
    sequences = 3 * train.steps * train.global_batch_size * settings.num_parts  # backward: twice
    fewest = FEWEST_ROWS if settings.probe.file else SHORT_RUN_PASSAGES
    rows = max(fewest, int(SHARE * sequences / validations))
    common: dict[str, Any] = {"run_folder": run_folder, "tokenizer": tokenizer}
    common |= {"max_length": length, "unpad": train.unpad}
    common["keeps_best"] = run.keep_best is not None
    if settings.probe.file is None:
        fraction = settings.data.validation_fraction
        texts, documents = passages_of(corpus, fraction, tokenizer, rows, PER_DOCUMENT)
        texts, documents = texts[:rows], documents[:rows]
        if len(documents) < FEWEST_PASSAGES or not (documents[:-1] == documents[1:]).any():
            return None
        note = f"next-passage recall: {len(texts)} passages of held-out documents"
        return TrainingProbe(**common, texts=texts, draws=None, documents=documents, notes=[note])
    path = settings.probe.file
    table = read_labelled(path, settings.probe.text_column, settings.probe.label_column)
    targets = targets_of(table.kind, table.labels, table.classes)
    draw_rows(table.kind, targets)  # refuses files of too few rows
    classes = len(table.classes)
    rows = max(rows, 2 * classes)
    chosen = choose_rows(table.kind, targets, rows)
    draws = draw_rows(
        table.kind, targets[chosen], draws=min(DRAWS, max(FEWEST_DRAWS, train.steps // 20))
    )
    note = (
        f"probe: {len(chosen)} of {len(targets)} rows of {path}, cut to {length} tokens; {draws.train_rows} fit "
        f"a linear model in each of {len(draws.train)} draws. Training reads no label, so rows may stand in the corpus."
    )
    notes = [*(f"{path}: {line}" for line in table.notes), note]
    texts = [table.texts[row] for row in chosen]
    return TrainingProbe(**common, texts=texts, draws=draws, documents=None, notes=notes)
