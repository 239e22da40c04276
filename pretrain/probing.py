"""Shows during pretraining whether it helps: a probe of the embeddings on labelled rows, or next-passage recall.

Step 0 measures the base model as it is, without new facets, which is what one has without pretraining. Each validation
embeds the same rows and compares each embedding with that model's mean over tokens. Without labels the rows are
passages of held-out documents.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from multicls.build import quiet_transformers
from multicls.corpus import Corpus
from multicls.distributed import on_rank_0
from multicls.errors import UserError
from multicls.files import atomic_folder, atomic_write, read_json, read_jsonl, write_json
from multicls.labels import LabelType, read_labelled
from multicls.modeling_multicls import TopicTable
from multicls.passages import Passages, read_passages
from multicls.probe import (
    DRAWS,
    VIEWS,
    Array,
    Difference,
    Draws,
    draw_rows,
    draws_of,
    embed,
    targets_of,
    values_of,
)
from pretrain.run_folder import BEFORE, BEST
from pretrain.settings import PretrainSettings

BASELINE = "probe.npz"  # in the run folder: the values of step 0
PLAN = "probe.json"  # in the run folder: the numbers of rows and draws, and a hash of the rows
SHARE = 0.03  # of the arithmetic of a run that the forward passes of all probes may take
FEWEST_ROWS = 300  # with labels, taken in a short run, too: fewer choose the wrong step
FEWEST_DRAWS = 10
SHORT_RUN_PASSAGES = 100
PER_DOCUMENT = 4  # passages, so that few passages come from many documents
FALLING = 3  # validations, each with a lower value than the one before, are a warning
TOO_EASY = 0.99  # a score at step 0 from which on no gain can be seen
COSTLY = 0.2  # share of a run's arithmetic from which on the log names the probe's


@dataclass(frozen=True)
class Best:
    """The best embedding of a step: its value, its name, and its change against the mean at step 0."""

    step: int
    value: float
    view: str
    change: Difference


@dataclass(eq=False)
class TrainingProbe:
    """Probes the embeddings of a run on the same rows at each validation.

    Attributes:
        texts: The rows, each a text or a pair of texts.
        measure: Makes values of the embeddings of the rows, and differences of values.
        plan: What `PLAN` holds.
        keeps_best: The export is of the best step, not of the last.
        untouched: Builds the model that step 0 measures, and its tokenizer; None: the engine's own model.
        topics: The topics of the corpus, if the run has them.
        advice: What to change if the embeddings get worse.
        best: The best embedding of the best step so far.
        latest: The best embedding of the last validation; `scores` and `last` have values and changes of all.
    """

    run_folder: Path
    tokenizer: Any
    max_length: int
    texts: list[Any]
    measure: Draws | Passages
    plan: dict[str, Any] = field(default_factory=dict)
    unpad: bool = False
    keeps_best: bool = False
    untouched: Callable[[], tuple[Any, Any]] | None = None
    topics: TopicTable | None = None
    advice: str = ""
    best: Best | None = None
    latest: Best | None = None
    seconds: float = 0.0
    history: list[float] = field(default_factory=list)
    first: dict[str, Array] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    last: dict[str, Difference] = field(default_factory=dict)

    @property
    def chosen(self) -> Best:
        """The embedding to take from the export, after the first validation.

        A model that began at random is not exported as it was before training, however good step 0 was.
        """
        is_exported = self.best is not None and (self.best.step > 0 or self.untouched is not None)
        chosen = self.best if self.keeps_best and is_exported else self.latest
        assert chosen is not None
        return chosen

    @property
    def recommended(self) -> str:
        """Name of the embedding that labels would be learned from; "" if passages alone are not sure of any."""
        is_shown = isinstance(self.measure, Draws) or self.chosen.change.low > 0
        return self.chosen.view if is_shown else ""

    def validate(self, engine: Any, step: int) -> tuple[dict[str, float], bool]:
        """Returns the metrics at `step`, and whether they are the best so far. All ranks call it."""
        begun = time.perf_counter()
        device = torch.device(engine.device)
        if step == 0 and self.untouched:
            found = on_rank_0(lambda: self._compare(self._embed_untouched(device), 0))
        else:
            engine.eval()
            # Layers that are compiled for one length of the sequences would compile for each length of the rows.
            torch.compiler.set_stance("force_eager")
            encode = partial(engine, objectives=(), unpad=self.unpad)
            ranks = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
            facets = engine.module.config.num_facets
            views = self._embed(encode, self.tokenizer, device, num_facets=facets, **ranks)
            torch.compiler.set_stance("default")
            engine.train()
            found = on_rank_0(lambda: self._compare(views, step))
        self.seconds += time.perf_counter() - begun
        return found

    def _embed_untouched(self, device: torch.device) -> dict[str, Array]:
        assert self.untouched is not None
        model, tokenizer = self.untouched()
        if self.keeps_best:  # it may be what is exported, when the checkpoint is not there any more
            with atomic_folder(self.run_folder / BEFORE) as fresh, quiet_transformers():
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
        encoder = model.multicls.eval().to(device)
        return self._embed(encoder, tokenizer, device, num_facets=model.config.num_facets)

    def _embed(self, encode: Any, tokenizer: Any, device: torch.device, **more: Any) -> Any:
        """Returns the embeddings of the rows by name; `more` goes to `embed`."""
        topics = self.topics.to(device) if self.topics else None
        sizes: Any = {"max_length": self.max_length, "device": device, "topics": topics}
        return embed(encode, tokenizer, self.texts, **sizes, **more)

    def _compare(self, views: dict[str, Array], step: int) -> tuple[dict[str, float], bool]:
        """Returns what `validate` does, on rank 0."""
        # Weights that are not finite have embeddings that are not.
        finite = {name: np.nan_to_num(x, posinf=0.0, neginf=0.0) for name, x in views.items()}
        values = values_of(self.measure, finite)
        path = self.run_folder / BASELINE
        if step == 0:
            with atomic_write(path, "wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]
            write_json(self.run_folder / PLAN, self.plan)
        if not self.first:
            with np.load(path, allow_pickle=False) as saved:
                self.first = dict(saved)
            self._take(0, self.first)
            self.history = self._recorded(step)
            if step > 0 and (best := self.run_folder / BEST).exists():  # of before a resume
                fields = read_json(best)
                self.best = Best(**fields | {"change": Difference(**fields["change"])})
        is_best = self._take(step, values)
        self.history.append(max(self.scores.values()))
        metrics: dict[str, float] = {}
        for name, change in self.last.items():
            metrics[f"probe/{name}"] = self.scores[name]
            metrics[f"probe/{name}_change"] = change.mean
            metrics[f"probe/{name}_change_low"] = change.low
            metrics[f"probe/{name}_change_high"] = change.high
        return metrics, is_best

    def _take(self, step: int, values: dict[str, Array]) -> bool:
        """Takes the values of a validation as the last ones; returns True if they are the best so far."""
        self.scores = {name: float(np.nanmean(found)) for name, found in values.items()}
        self.last = {n: self.measure.difference(x, self.first["mean"]) for n, x in values.items()}
        view = max(self.scores, key=self.scores.__getitem__)
        self.latest = Best(step, self.scores[view], view, self.last[view])
        is_best = self.best is None or self.latest.value > self.best.value
        if is_best:
            self.best = self.latest
        return is_best

    def _recorded(self, step: int) -> list[float]:
        """Returns the best score of each validation before `step` that metrics.jsonl has."""
        records = [r for r in read_jsonl(self.run_folder / "metrics.jsonl") if r["step"] < step]
        scores = [[v for n in VIEWS if (v := r.get(f"probe/{n}")) is not None] for r in records]
        return [max(values) for values in scores if values]

    def write_best(self) -> None:
        """Writes best.json; only rank 0 knows what it holds."""
        assert self.best is not None
        write_json(self.run_folder / BEST, asdict(self.best))

    def warnings(self) -> list[str]:
        """Returns warnings after a validation; none if the embeddings do not get worse."""
        recent = self.history[-FALLING:]
        if len(recent) == FALLING and all(a > b for a, b in pairwise(recent)):
            values = ", ".join(f"{100 * value:.1f}" for value in recent)
            return [
                f"the {self.measure.name} falls ({values} at {FALLING} validations). {self.advice}"
            ]
        return []

    def changes(self) -> str:
        """Returns the changes of the last validation in one line."""
        shown = [f"{name} {change}" for name, change in self.last.items()]
        return f"{self.measure.name}, against the mean at step 0: {', '.join(shown)}"

    def summary(self, seconds: float) -> list[str]:
        """Returns lines for the end of a start of `seconds`: before and after, and which embedding to take."""
        lines = []
        for name, change in self.last.items():
            before = f"{100 * np.nanmean(self.first[name]):.1f} -> " if name in self.first else ""
            lines.append(
                f"{self.measure.name}, {name}: {before}{100 * self.scores[name]:.1f}; against the mean at step 0 "
                f"{change}"
            )
        assert self.best and self.latest
        lines.append(
            f"the best embedding is {self.chosen.view}; the best step was {self.best.step}; measuring took "
            f"{self.seconds:.0f} s, {self.seconds / seconds:.1%} of the time"
        )
        all_worse = self.latest.change.high < 0
        if all_worse or self.last["mean"].high < 0:
            is_kept = self.keeps_best and self.chosen is self.best
            kept = f" The best step, {self.best.step}, is kept." if is_kept else ""
            what = "all embeddings" if all_worse else "the mean over tokens"
            lines.append(f"warning: the run made {what} worse.{kept} {self.advice}")
        if max(float(np.nanmean(found)) for found in self.first.values()) >= TOO_EASY:
            lines.append(
                "these labels are too easy to show a gain: step 0 has them nearly all right"
            )
        elif self.chosen.change.low <= 0:
            lines.append("no gain is shown: the interval of the best embedding holds 0")
        return lines


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


def choose_rows(kind: LabelType, targets: Array, most: int) -> Array:
    """Returns the indices of at most `most` rows, at random but always the same, with two of each class at least."""
    order = np.random.default_rng(0).permutation(len(targets))
    chosen = set(order[:most].tolist())
    for name in np.unique(targets) if kind == "class" else ():
        chosen |= set(order[targets[order] == name][:2].tolist())
    return np.array(sorted(chosen))


def plan_rows(settings: PretrainSettings) -> dict[str, Any]:
    """Returns the numbers of rows and draws of a run's probe.

    They follow from the arithmetic of the run: with more than 300 labelled rows or 100 passages, the forward passes of
    all probes take at most 3 % of it.

    Args:
        settings: With steps and intervals as numbers.
    """
    fewest = FEWEST_ROWS if settings.probe.file else SHORT_RUN_PASSAGES
    rows = max(fewest, int(SHARE / cost(settings, 1)))
    return {"rows": rows, "draws": min(DRAWS, max(FEWEST_DRAWS, settings.train.steps // 20))}


def cost(settings: PretrainSettings, rows: int) -> float:
    """Returns the share that the forward passes of probes of so many rows have of a run's arithmetic."""
    train = settings.train
    validations = 1 + math.ceil(train.steps / settings.run.eval_every)
    sequences = 3 * train.steps * train.global_batch_size * settings.num_parts  # backward: twice
    return rows * validations / sequences


def _read_rows(
    file: str, settings: PretrainSettings, plan: dict[str, Any]
) -> tuple[list[Any], Array, Draws, list[str]]:
    """Returns the texts of the planned rows of a probe file, their labels, the probe, and lines for the log."""
    table = read_labelled(file, settings.probe)
    targets = targets_of(table.kind, table.labels, table.classes)
    draws_of(table, file)  # refuses files of too few rows
    chosen = choose_rows(table.kind, targets, max(plan["rows"], 2 * len(table.classes)))
    measure = draw_rows(table.kind, targets[chosen], draws=plan["draws"])
    notes = [f"{file}: {line}" for line in table.notes]
    notes.append(
        f"probe: {len(chosen)} of {len(targets)} rows of {file}, cut to {settings.data.seq_length} tokens; "
        f"{measure.train_rows} fit a linear model in each of {len(measure.train)} draws. Training reads no label, so "
        "rows may stand in the corpus."
    )
    return [table.texts[row] for row in chosen], targets[chosen], measure, notes


def build_probe(
    settings: PretrainSettings,
    corpus: Corpus,
    tokenizer: Any,
    *,
    resumes: bool,
    untouched: Callable[[], tuple[Any, Any]] | None = None,
) -> tuple[TrainingProbe | None, list[str]]:
    """Returns the probe of a run and lines for the log; None if nothing can be measured or compared.

    A run that resumes keeps its numbers of rows and draws, also with more steps than before.

    Args:
        settings: With steps and intervals as numbers.
        untouched: As in `TrainingProbe`.

    Raises:
        multicls.errors.UserError: The probe file cannot be read, its rows do not make a probe, or the run resumes with
            other rows and `run.keep_best`, and so could not tell which step is the best.
    """
    run, length, file = settings.run, settings.data.seq_length, settings.probe.file
    path = Path(run.output_dir) / PLAN
    old = read_json(path) if resumes and path.exists() else None
    plan = old or plan_rows(settings)
    measure: Draws | Passages
    texts: list[Any]
    if file is None:
        fraction = settings.data.validation_fraction
        measure = read_passages(corpus, fraction, tokenizer, plan["rows"], PER_DOCUMENT)
        texts, labels = measure.texts, measure.documents
        if not measure.are_enough:
            few = "too few passages are held out to measure their recall"
            why = "; so run.keep_best has nothing to choose by" if run.keep_best else ""
            return None, [few + why]
        notes = [f"next-passage recall: {len(texts)} passages of held-out documents"]
    else:
        texts, labels, measure, notes = _read_rows(file, settings, plan)
    if (share := cost(settings, len(texts))) > COSTLY:
        notes.append(
            f"note: measuring takes about {share:.0%} of this run; validate less often by --run.eval_every"
        )
    content = json.dumps([texts, labels.tolist()]).encode()
    plan = {**plan, "hash": hashlib.sha256(content).hexdigest()}
    if resumes and plan != old:
        problem = (
            "the run began with other rows to probe, or with none, so that nothing can be compared"
        )
        if run.keep_best:
            raise UserError(f"{problem}: set --probe_file as then, or --run.keep_best null.")
        return None, [f"warning: {problem}: no probe. Set --probe_file as at the start."]
    probe = TrainingProbe(Path(run.output_dir), tokenizer, length, texts, measure, plan)
    probe.unpad, probe.keeps_best = settings.train.unpad, run.keep_best is not None
    probe.untouched, probe.advice = untouched, advice(settings)
    return probe, notes
