"""What a results folder compares: systems, the candidates that each chose from, and their runs.

A system is declared: by a plan (the grid's recipe names it), or, for a run that no plan asks for, by its model, head
and requested settings. A run belongs to a system by what was requested of it, so that it does not matter which command
made it, and no run can change the rows of another system.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.tasks import TASKS
from finetune.stats.ensembles import average_predictions, ensemble, member_sets
from finetune.store.results import Array, Record, Store, short_hash
from multicls.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from finetune.stats.estimates import Estimate

SHORT = {"learning_rate": "lr", "batch_size": "batch"}  # names of settings in tables
Values = dict[str, Any]  # of the settings that a candidate tries, by dotted name


@dataclass(frozen=True)
class System:
    """One way to fine-tune that is compared with others."""

    name: str  # unique in a report
    label: str  # head and pooling
    selection: str  # which rows choose: "dev" or "holdout"
    mode: str = ""  # device, precision and DeepSpeed file, in words; "" if all runs of the folder have the same

    @property
    def title(self) -> str:
        """The name with what tells the system from others of that name."""
        return ", ".join(filter(None, (self.name, "holdout" * (self.selection == "holdout"), self.mode)))


@dataclass(frozen=True)
class Candidate:
    """Settings that a system could have on a task at a size."""

    values: Values  # of the settings that were tried
    finished: int  # runs that are there
    planned: int  # runs that there should be
    score: float  # mean (or median) of the finished runs on the choosing rows, in percent; nan without runs
    chosen: bool = False  # the system takes these settings

    @property
    def text(self) -> str:
        """The values for tables, such as "lr 2e-05, beta 0.5"."""
        return ", ".join(_setting(name, value) for name, value in self.values.items())


@dataclass(frozen=True)
class SystemResult:
    """A system on one task at one train size."""

    system: System
    task: str
    train_size: str
    records: list[Record]  # the runs with the chosen settings
    candidates: list[Candidate]  # the settings that were tried
    planned: int  # runs that each candidate should have
    store: Store = field(repr=False, compare=False)

    @property
    def metric(self) -> str:
        """The main metric."""
        return str(self.records[0]["metric"])

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The runs' scores in percent, with columns pretraining, draw, seed, score. All rows are one draw."""
        import pandas as pd

        first = min(record["data_seed"] for record in self.records)
        rows = [(record["fingerprint"], first if record.get("all_rows") else record["data_seed"], record["seed"],
                 100 * record["score"]) for record in self.records]  # fmt: skip
        return pd.DataFrame(rows, columns=["pretraining", "draw", "seed", "score"])

    @cached_property
    def estimate(self) -> Estimate:
        """Mean and 95 % interval over pretrainings and draws of rows."""
        from finetune.stats.estimates import estimate

        return estimate(self.frame)

    @property
    def constant(self) -> float:
        """Score of the constant answer in percent; nan if the runs are too old to know."""
        values = [record["constant"][self.metric] for record in self.records if self.metric in record["constant"]]
        return 100 * float(np.mean(values)) if values else math.nan

    @property
    def notes(self) -> list[str]:
        """The notes and warnings of all runs, each once."""
        return list(dict.fromkeys(chain.from_iterable(record["notes"] for record in self.records)))

    @property
    def problems(self) -> list[str]:
        """The incomplete candidates, in words."""
        short = [one for one in self.candidates if one.finished < one.planned]
        return [f"{one.text or 'runs'} incomplete: {one.finished} of {one.planned}" for one in short]

    def predictions(self) -> list[dict[str, Array]]:
        """Returns the saved arrays of each run; those of an ensemble are averages."""
        return [average_predictions([self.store.predictions(run_id) for run_id in record["members"]])
                if "members" in record else self.store.predictions(record["run_id"])
                for record in self.records]  # fmt: skip

    @cached_property
    def loaded(self) -> tuple[list[dict[str, Array]], str]:
        """The `predictions` but those of test rows, which are many; and why there are none, if files are missing."""
        try:
            return [{name: array for name, array in run.items() if not name.startswith("test_")}
                    for run in self.predictions()], ""  # fmt: skip
        except UserError as error:
            return [], str(error)

    @property
    def classified(self) -> list[dict[str, Array]]:
        """Those of the `loaded` predictions that are of one class a row."""
        return [run for run in self.loaded[0] if "logits" in run and run["labels"].ndim == 1]


@dataclass(frozen=True)
class Results:
    """All that a report shows: rows in the order of tasks, sizes and plans, and in words which rows have problems."""

    rows: list[SystemResult]
    never_run: list[str]  # planned rows without a finished run
    mixed: list[str]  # rows whose runs differ in versions, commits, hardware or resolved settings


def _setting(name: str, value: Any) -> str:
    """Returns a setting for tables, such as "lr 2e-05"."""
    short = name.rpartition(".")[2]
    return f"{SHORT.get(short, short)} " + (f"{value:g}" if isinstance(value, float) else str(value))


@dataclass
class _Wanted:
    """The runs that are asked for, of one system on one task at one size, and those of them that are finished."""

    system: System
    task: str
    train_size: str
    choose: str = "mean"  # or "median"
    joint: tuple[str, ...] = ()  # the tasks that share the model, if there are several
    values: dict[str, Values] = field(default_factory=dict)  # of each candidate, by its key
    request_ids: dict[str, list[str]] = field(default_factory=dict)  # of each candidate's runs
    runs: dict[str, list[Record]] = field(default_factory=dict)  # each candidate's finished ones, in one numeric mode

    @property
    def planned(self) -> int:
        """Runs that each candidate should have."""
        return max(map(len, self.request_ids.values()))

    def add(self, values: Values, request_id: str) -> None:
        """Adds a run to its candidate; a run that two plans ask for counts once."""
        key = repr(sorted(values.items()))
        self.values[key] = values
        known = self.request_ids.setdefault(key, [])
        known += [request_id] * (request_id not in known)


def load_results(store: Store, ensembles: int = 0) -> Results:
    """Returns the systems of a results folder with their runs.

    With `ensembles` it adds for each system that of ensembles of so many runs of one model and draw.

    Raises:
        UserError: The folder is of another protocol.
    """
    records = store.records()
    wanted = _wanted_by_plans(store.plans(), records)
    asked = {request_id for one in wanted for ids in one.request_ids.values() for request_id in ids}
    wanted += _wanted_by_themselves([record for record in records if record["request_id"] not in asked])
    found, never_run = list[_Wanted](), list[str]()
    for one in wanted:
        finished = _find(one, records)
        found += finished
        never_run += [] if finished else [f"{one.system.title} on {one.task} with {one.train_size} rows"]
    if ensembles:
        found += [made for one in found if (made := _ensembles_of(one, ensembles, store))]
    rows = sorted((_choose(one, found, store) for one in found), key=_order)
    return Results(rows, never_run, [text for row in rows if (text := _differences(row))])


def _wanted_by_plans(plans: Iterable[Mapping[str, Any]], records: Sequence[Record]) -> list[_Wanted]:
    """Returns the systems that plans name.

    If plans give one name to different settings, the plan with the earliest run keeps it; the names of the others say
    which settings differ.
    """
    place_of = {record["request_id"]: place for place, record in enumerate(records)}
    plans = sorted(plans, key=lambda plan: min(place_of.get(run["request_id"], len(place_of)) for run in plan["runs"]))
    changed = {run["request_id"]: run["changed"] for plan in plans for run in plan["runs"] if "changed" in run}
    disputed = _disputed_settings(chain.from_iterable(plan["runs"] for plan in plans), changed)
    wanted: dict[Hashable, _Wanted] = {}
    owners: dict[str, tuple[int, set[str]]] = {}  # the first plan of each name, and its values of disputed settings
    for number, plan in enumerate(plans):
        for run in plan["runs"]:
            values = changed.get(run["request_id"], {})
            parts = [_setting(name, values.get(name, "default")) for name in sorted(disputed[run["system"]])]
            name = ", ".join([run["system"], *parts])
            owner, kept = owners.setdefault(run["system"], (number, set()))
            if owner == number:
                kept.add(name)
            system = System(run["system"] if name in kept else name, run["label"], run["selection"])
            place = (system, run["task"], run["train_size"])
            one = wanted.setdefault(place, _Wanted(*place, plan["choose"], tuple(run["joint"])))
            one.add(run["candidate"], run["request_id"])
    return list(wanted.values())


def _disputed_settings(runs: Iterable[Mapping[str, Any]], changed: Mapping[str, Values]) -> dict[str, set[str]]:
    """Returns for each system the settings that its runs on one task at one size do not agree on."""
    disputed: dict[str, set[str]] = defaultdict(set)
    seen: dict[Hashable, Values] = {}
    for run in runs:
        place = (run["system"], run["selection"], run["task"], run["train_size"])
        values = changed.get(run["request_id"], {})
        first = seen.setdefault(place, values)
        disputed[run["system"]] |= {name for name in first | values if first.get(name) != values.get(name)}
    return disputed


def _wanted_by_themselves(records: Iterable[Record]) -> list[_Wanted]:
    """Returns the systems of runs that no plan asks for: equal ones were requested alike, but for their seeds."""
    wanted: dict[Hashable, _Wanted] = {}
    names: dict[str, str] = {}  # a name belongs to the first request that has it
    for record in records:
        alike = {name: value for name, value in record["requested"].items() if name not in ("seed", "data_seed")}
        model = record["model_name"] or f"{Path(record['model']).name} ({record['fingerprint'][:6]})"
        parts = [f"{model} {record['label']}", *(_setting(name, value) for name, value in record["changed"].items())]
        name, key = ", ".join(parts), short_hash([model, {**alike, "task": "", "train_size": ""}])
        if names.setdefault(name, key) != key:
            name = f"{name} ({key[:6]})"
        place = (System(name, record["label"], record["selection"]), record["task"], record["train_size"])
        wanted.setdefault(place, _Wanted(*place)).add({}, record["request_id"])
    return list(wanted.values())


def _find(wanted: _Wanted, records: Sequence[Record]) -> list[_Wanted]:
    """Returns the wanted runs with those that are finished, apart for each numeric mode in which there are some.

    A run that took all rows is not wanted if a run of another data seed took them before.
    """
    asked = {request_id for ids in wanted.request_ids.values() for request_id in ids}
    modes = [_mode(record) for record in records]
    by_mode: dict[str, dict[str, Record]] = defaultdict(dict)
    for mode, record in zip(modes, records, strict=True):
        if record["request_id"] in asked:
            by_mode[mode][record["request_id"]] = record
    found = []
    for mode, done in by_mode.items():
        request_ids = {key: _without_repeats(ids, done) for key, ids in wanted.request_ids.items()}
        runs = {key: [done[one] for one in ids if one in done] for key, ids in request_ids.items()}
        system = replace(wanted.system, mode=mode if len(set(modes)) > 1 else "")
        found.append(replace(wanted, system=system, request_ids=request_ids, runs=runs))
    return found


def _without_repeats(request_ids: Iterable[str], done: Mapping[str, Record]) -> list[str]:
    first: dict[Hashable, str] = {}
    for one in request_ids:
        record = done.get(one, {})
        first.setdefault((record["fingerprint"], record["seed"]) if record.get("all_rows") else one, one)
    return list(first.values())


def _mode(record: Record) -> str:
    """Returns the numeric mode of a run in words."""
    numeric = record["numeric"]
    text = f"{numeric['precision']} on {numeric['device']}"
    return text + (f" with DeepSpeed {numeric['deepspeed'][:6]}" if numeric["deepspeed"] else "")


def _choose(one: _Wanted, everything: Sequence[_Wanted], store: Store) -> SystemResult:
    """Takes the candidate with the best score on the choosing rows, complete ones first.

    The tasks of a joint system share a model, so that the candidate with the best mean over them is taken for all.
    """
    together = [other for other in everything if other is one or (
        one.joint and (other.system, other.joint, other.train_size) == (one.system, one.joint, one.train_size)
    )]  # fmt: skip

    def merit(key: str) -> tuple[bool, float]:
        complete = all(len(other.runs.get(key, [])) == other.planned for other in together)
        mean = float(np.mean([choosing_score(other.runs.get(key, []), one.choose) for other in together]))
        return complete, -math.inf if math.isnan(mean) else mean

    best = max((key for key, runs in one.runs.items() if runs), key=merit)
    scores = {key: choosing_score(runs, one.choose) for key, runs in one.runs.items()}
    candidates = [Candidate(values, len(one.runs[key]), one.planned, scores[key], key == best)
                  for key, values in one.values.items()]  # fmt: skip
    return SystemResult(one.system, one.task, one.train_size, one.runs[best], candidates, one.planned, store)


def choosing_score(runs: Sequence[Record], choose: str) -> float:
    """Returns the mean or median score of runs, in percent, on the rows that chose their best evaluations; else nan.

    Units of the mean are pretrainings and draws, as in estimates: seeds are averaged first, so that a unit with more
    finished seeds has no more weight.
    """
    units: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        score = 100 * run.get("holdout_scores", run["scores"])[run["metric"]]
        units["all" if choose == "median" else (run["fingerprint"], run["data_seed"])].append(score)
    average = np.median if choose == "median" else np.mean
    return float(np.mean([average(scores) for scores in units.values()])) if units else math.nan


def _ensembles_of(one: _Wanted, size: int, store: Store) -> _Wanted | None:
    """Returns the system of ensembles of `size` runs, None if no candidate has enough runs.

    Each candidate has its own ensembles, so that they choose by their own scores.
    """
    runs: dict[str, list[Record]] = {}
    for key, found in one.runs.items():
        runs[key] = [ensemble(store, members, number) for number, members in enumerate(member_sets(found, size), 1)]
    if not any(runs.values()):
        return None
    ids = {key: [f"{size} runs {number}" for number in range(max(map(len, runs.values())))] for key in runs}
    system = replace(one.system, name=f"{one.system.name} x{size}", label=f"{one.system.label} x{size}")
    return replace(one, system=system, request_ids=ids, runs=runs)


def _differences(row: SystemResult) -> str:
    """Returns in words how the runs of a row differ in what was not requested; "" if they do not."""
    seen: dict[str, set[str]] = defaultdict(set)
    names = dict.fromkeys(name for record in row.records for name in record["resolved"]["train"])
    for record in row.records:
        values = {"commits": record.get("git_commit"), "GPUs": record.get("gpu")}
        values |= {f"versions of {package}": record["versions"].get(package) for package in ("torch", "transformers")}
        values |= {f"values of {name}": record["resolved"]["train"].get(name) for name in names}
        for kind, value in values.items():
            seen[kind].add(str(value))
    mixed = [f"{len(values)} {kind}" for kind, values in seen.items() if len(values) > 1]
    return f"{row.system.title} on {row.task}, {row.train_size} rows: runs of {', '.join(mixed)}" if mixed else ""


def _order(row: SystemResult) -> tuple[int, str, float]:
    """Sorts by task in the order of their table, then by size; plans' order is kept within."""
    place = list(TASKS).index(row.task) if row.task in TASKS else len(TASKS)
    return place, row.task, math.inf if row.train_size == "full" else float(row.train_size)
