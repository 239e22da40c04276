"""Shows during pretraining whether it helps, and selects the step to export.

Each validation embeds the same rows and compares each embedding with the base model's own, its mean over tokens or its
[CLS]: by a probe on labelled rows, or without labels by next-passage recall on held-out documents. Step 0 measures the
base model as it is, without new facets, which is what one has without pretraining.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from multicls.build import quiet_transformers
from multicls.console import count
from multicls.corpus import Corpus
from multicls.distributed import on_rank_0
from multicls.embeddings import EMBEDDINGS, embed_rows
from multicls.errors import UserError
from multicls.evaluation import Difference, Scores, random_draws, rows_of, verdict
from multicls.files import atomic_folder, atomic_write, read_json, read_jsonl, write_json
from multicls.labels import LabelType, read_labelled
from multicls.measures import Array
from multicls.modeling_multicls import TopicTable
from multicls.passages import Passages, read_passages
from multicls.systems import Probe
from pretrain.folder import RunFolder
from pretrain.observe import Observer
from pretrain.settings import PretrainSettings

ROWS = 300  # at most; fewer choose the wrong step
TRAIN_ROWS = 100  # of a draw; half of the rows where there are fewer than twice as many
DRAWS = 10
PER_DOCUMENT = 4  # passages, so that few passages come from many documents
FALLING = 3  # validations, each with a lower value than the one before, are a warning if the last is worse than step 0

Report = Callable[[str], None]


@dataclass(frozen=True)
class ProbeRows:
    """The rows that a run probes.

    Attributes:
        texts: Tuples of one text or two.
        measure: Scores the embeddings of the rows.
        hash: Changes with the rows.
        notes: Lines for the log.
    """

    texts: Sequence[tuple[str, ...]]
    measure: Probe | Passages
    hash: str = ""
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Returns the name of a row in the log."""
        return "labelled row" if isinstance(self.measure, Probe) else "passage"


def read_rows(
    settings: PretrainSettings, corpus: Corpus, tokenizer: Any, resumes: bool
) -> tuple[ProbeRows | None, list[str]]:
    """Returns the rows that a run probes, or None with the reason as a line for the log.

    A run without steps needs labels: recall judges the embedding, which no step changes, and not the topics.

    Raises:
        UserError: The probe file cannot be read, its rows do not make a probe, or the run resumes with other rows, so
            that nothing can be compared.
    """
    if not (settings.probe.file or settings.train.steps):
        return None, ["nothing is measured: labelled rows (--probe_file) judge topics"]
    rows = (
        _labelled_rows(settings) if settings.probe.file else _passages(settings, corpus, tokenizer)
    )
    if not rows.texts:
        few = "too few passages are held out to measure their recall"
        why = "; so run.keep_best has nothing to choose by" if settings.run.keep_best else ""
        return None, [few + why]
    plan = RunFolder(Path(settings.run.output_dir)).plan
    if resumes and (not plan.exists() or read_json(plan)["hash"] != rows.hash):
        raise UserError(
            "probe.file: the run began with other rows to probe, or with none, so that nothing can be compared: set "
            "--probe_file as then, or another --output_dir."
        )
    return rows, list(rows.notes)


def _passages(settings: PretrainSettings, corpus: Corpus, tokenizer: Any) -> ProbeRows:
    """Returns passages of held-out documents; no texts if there are too few."""
    fraction = settings.data.validation_fraction
    passages = read_passages(corpus, fraction, tokenizer, ROWS, PER_DOCUMENT)
    if not passages.are_enough:
        return ProbeRows([], passages)
    note = f"next-passage recall: {len(passages.texts)} passages of held-out documents"
    texts = [(text,) for text in passages.texts]
    return ProbeRows(texts, passages, _hash(texts, passages.documents), (note,))


def _labelled_rows(settings: PretrainSettings) -> ProbeRows:
    """Returns rows of the probe file."""
    file = str(settings.probe.file)
    table = read_labelled(file, settings.probe)
    every = rows_of(table, file)
    chosen = choose_rows(every.kind, every.targets, max(ROWS, 2 * len(table.classes)))
    rows = every.take(chosen)
    splits = random_draws(rows, TRAIN_ROWS, DRAWS)
    notes = [f"{file}: {line}" for line in table.notes]
    notes.append(
        f"probe: {len(chosen)} of {len(every.targets)} rows of {file}, cut to {settings.data.seq_length} tokens; "
        f"{splits.train_rows} fit a linear model in each of {DRAWS} draws. Training reads no label, so rows may stand "
        "in the corpus."
    )
    hashed = _hash(rows.texts, rows.targets)
    return ProbeRows(rows.texts, Probe(rows, splits), hashed, tuple(notes))


def _hash(texts: Sequence[tuple[str, ...]], labels: Array) -> str:
    content = json.dumps([list(texts), labels.tolist(), ROWS, DRAWS])
    return hashlib.sha256(content.encode()).hexdigest()


def choose_rows(kind: LabelType, targets: Array, most: int) -> Array:
    """Returns the indices of at most `most` rows, at random but always the same, with two of each class at least."""
    order = np.random.default_rng(0).permutation(len(targets))
    chosen = set(order[:most].tolist())
    for name in np.unique(targets) if kind == "class" else ():
        chosen |= set(order[targets[order] == name][:2].tolist())
    return np.array(sorted(chosen))


class Selection(Observer):
    """Probes the embeddings of a run at each validation, reports what changes, and selects the step to export.

    Args:
        rows: The rows, the same at each validation.
        untouched: Builds the model that step 0 measures, and its tokenizer; None: the engine's own model.
        reference: The part that the base model's own sentence embedding is: "mean" or "cls".
        topics: The topics of the corpus, if the run has them.
        report: Receives the lines for the log.

    Attributes:
        history: The best embedding's value at each validation so far, by step.
        scores: The value of each embedding at the last validation, and `last` its change against step 0.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        rows: ProbeRows,
        tokenizer: Any,
        *,
        untouched: Callable[[], tuple[Any, Any]] | None = None,
        reference: str = "mean",
        topics: TopicTable | None = None,
        report: Report = lambda line: None,
    ) -> None:
        self._settings, self._rows, self._measure = settings, rows, rows.measure
        self._tokenizer, self._untouched, self._topics = tokenizer, untouched, topics
        self._reference = reference
        self._report, self._folder = report, RunFolder(Path(settings.run.output_dir))
        self._keeps_best = settings.run.keep_best is not None
        self.history: dict[int, float] = {}
        self.first: dict[str, Scores] = {}  # of step 0, and the model's own embedding of the rows
        self.own: Array = np.zeros(0)
        self.scores: dict[str, float] = {}
        self.last: dict[str, Difference] = {}
        self._seconds, self._begun = 0.0, time.perf_counter()

    def measure(self, engine: Any, done: int) -> dict[str, float]:
        """Returns the value of each embedding and its change against step 0, with the interval."""
        begun = time.perf_counter()
        if done == 0 and self._untouched:
            metrics = on_rank_0(lambda: self.compare(self._embed_untouched(engine.device), 0))
        else:
            with engine.evaluation():
                ranks = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
                parts = self._embed(
                    engine.encode, self._tokenizer, engine.device, engine.module, **ranks
                )
            metrics = on_rank_0(lambda: self.compare(parts, done))
        self._seconds += time.perf_counter() - begun
        return metrics

    def _embed_untouched(self, device: torch.device) -> dict[str, Array]:
        assert self._untouched is not None
        model, tokenizer = self._untouched()
        if (
            self._keeps_best
        ):  # it may be what is exported, when the checkpoint is not there any more
            with atomic_folder(self._folder.before) as fresh, quiet_transformers():
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
        return self._embed(model.multicls.eval().to(device), tokenizer, device, model)

    def _embed(self, encode: Any, tokenizer: Any, device: Any, model: Any, **ranks: int) -> Any:
        """Returns the embeddings of the rows by part."""
        return embed_rows(
            encode,
            tokenizer,
            self._rows.texts,
            max_length=self._settings.data.seq_length,
            num_facets=model.config.num_facets,
            device=device,
            topics=self._topics.to(device) if self._topics else None,
            **ranks,
        )

    def compare(self, parts: Mapping[str, Array], step: int) -> dict[str, float]:
        """Returns what `measure` does, from the embeddings of the rows at a step. Rank 0 calls it."""
        # Weights that are not finite have embeddings that are not.
        finite = {part: np.nan_to_num(x, posinf=0.0, neginf=0.0) for part, x in parts.items()}
        scores = self._measure.scores(finite)
        if step == 0:
            with atomic_write(self._folder.baseline, "wb") as file:
                np.savez(file, **finite)  # type: ignore[arg-type]
            measure = f"{self._measure.name}, {count(len(self._rows.texts), self._rows.unit)}"
            plan = {"hash": self._rows.hash, "measure": measure, "reference": self._reference}
            write_json(self._folder.plan, plan)
        if not self.first:
            self._begin(step, scores)
        self.scores = {name: found.mean for name, found in scores.items()}
        reference = self.first[self._reference]
        self.last = {n: self._measure.difference(found, reference) for n, found in scores.items()}
        self.history[step] = max(self.scores.values())
        metrics = {"probe/cosine_to_start": mean_cosine(finite[self._reference], self.own)}
        for name, change in self.last.items():
            metrics[f"probe/{name}"] = self.scores[name]
            metrics[f"probe/{name}_change"] = change.mean
            metrics[f"probe/{name}_change_low"] = change.low
            metrics[f"probe/{name}_change_high"] = change.high
        return metrics

    def _begin(self, step: int, scores: Mapping[str, Scores]) -> None:
        """Reads step 0's embeddings and the values in metrics.jsonl; the first validation, of `step`, has `scores`."""
        with np.load(self._folder.baseline, allow_pickle=False) as saved:
            parts = {part: saved[part] for part in saved}
        self.own = parts[self._reference]
        self.first = dict(scores) if step == 0 else self._measure.scores(parts)
        self.history = {0: max(found.mean for found in self.first.values())}
        for record in read_jsonl(self._folder.metrics):
            values = [record[f"probe/{name}"] for name in EMBEDDINGS if f"probe/{name}" in record]
            if values and record["step"] < step:
                self.history[record["step"]] = max(values)

    def keeps(self, done: int) -> bool:
        """Reports a fall that is clear, and returns True if the step is the best so far and the best one is kept."""
        recent = list(self.history.values())[-FALLING:]
        is_worse = verdict(self.last[max(self.scores, key=self.scores.__getitem__)]) == "worse"
        if is_worse and len(recent) == FALLING and all(a > b for a, b in pairwise(recent)):
            values = ", ".join(f"{100 * value:.1f}" for value in recent)
            self._report(
                f"warning: the {self._measure.name} falls ({values} at {FALLING} validations). {advice(self._settings)}"
            )
        best, to_exceed = self._folder.best_step, self.history[0]
        if best in self._folder.saved_steps:  # a user may have removed a damaged one
            to_exceed = read_json(self._folder.best)["value"]
        return self._keeps_best and self.history[done] > to_exceed

    def on_kept(self, done: int) -> None:
        """Writes best.json: the checkpoint is there."""
        write_json(self._folder.best, {"step": done, "value": self.history[done]})

    def exported(self, step: int) -> int:
        """Returns the best step if the run keeps it; 0 if no step was better than step 0, and that model is known."""
        if not self._keeps_best:
            return step
        if best := self._folder.best_step:
            self._report(f"the best step by the probe, {best}, is exported")
            return best
        if self._untouched is None:
            return step
        self._report(
            "no step was better than step 0: the model before training is exported, without new facets"
        )
        return 0

    def on_end(self) -> None:
        """Reports warnings and what measuring took; `pretrain.verdict` has the result."""
        for line in self.summary():
            self._report(line)

    def summary(self) -> list[str]:
        """Returns lines for the end of a run: warnings, and what measuring took."""
        if not self.history:  # another rank than 0
            return []
        best = max(self.history, key=self.history.__getitem__)
        share = self._seconds / (time.perf_counter() - self._begun)
        lines = [
            f"the best step was {best}; measuring took {self._seconds:.0f} s, {share:.1%} of the time"
        ]
        worse = [name for name, change in self.last.items() if verdict(change) == "worse"]
        if len(worse) == len(self.last) or self._reference in worse:
            lines.append(f"warning: worse are {', '.join(worse)}. {advice(self._settings)}")
        return lines


def mean_cosine(embeddings: Array, before: Array) -> float:
    """Returns the mean cosine of the embeddings of rows, (..., D), with those before training."""
    lengths = np.linalg.norm(embeddings, axis=-1) * np.linalg.norm(before, axis=-1)
    return float(((embeddings * before).sum(axis=-1) / np.maximum(lengths, 1e-12)).mean())


def advice(settings: PretrainSettings) -> str:
    """Returns what to change in a run that makes the embeddings worse."""
    hints = ["Use fewer --steps or a lower --learning_rate"]
    if max(settings.objective.mlm, settings.objective.tfidf) > 0.1:
        hints.append(
            "set --objective.mlm and --objective.tfidf to 0.1 or 0 where the checkpoint has no MLM head"
        )
    if not settings.run.keep_best:
        hints.append("set --run.keep_best probe")
    return ", or ".join(hints) + "."
