"""The verdict on a run: whether its embeddings are better than the original model's own one.

The end of a run, tools/first_look.py and the model card show it, from the same records.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from multicls.cards import EXPORT_INFO
from multicls.embeddings import EMBEDDINGS
from multicls.evaluation import Difference, verdict
from multicls.files import read_json, read_jsonl
from pretrain.folder import RunFolder


@dataclass(frozen=True)
class Verdict:
    """The verdict on the model of a step.

    Attributes:
        step: Step of the validation; 0: the original model itself.
        measure: The score and its rows, in words.
        reference: The embedding of the original model that all are compared with.
        before: The score of the reference.
        scores: The score of each embedding of the model, as a share.
        changes: Its difference to `before`.
    """

    step: int
    measure: str
    reference: str
    before: float
    scores: Mapping[str, float]
    changes: Mapping[str, Difference]

    @property
    def embedding(self) -> str:
        """Name of the best embedding that is better than the original model's; "" if none is."""
        better = [name for name, change in self.changes.items() if verdict(change) == "better"]
        return max(better, key=self.scores.__getitem__, default="")

    @property
    def advice(self) -> str:
        """Returns a sentence that names the embedding to use."""
        if self.embedding:
            return f"Use {self.embedding}: better than the original model."
        if not self.step:
            return "Use the original model: nothing was better, so it is what is exported."
        words = {verdict(change) for change in self.changes.values()}
        found = (
            "all embeddings are worse" if words == {"worse"} else "no clear change for the better"
        )
        return f"Use the original model: {found}."

    @property
    def title(self) -> str:
        """Returns the heading of the changes: the measure and the original model's value."""
        return f"{self.measure}; original model ({self.reference}): {100 * self.before:.1f}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Returns each embedding with its score, its difference to the original model's, and the verdict."""
        return [
            (name, f"{100 * self.scores[name]:.1f}", str(change), verdict(change))
            for name, change in self.changes.items()
        ]

    def lines(self) -> list[str]:
        """Returns the verdict for the console."""
        rows = [f"  {n:14}{score:>6}   {change:24}{word}" for n, score, change, word in self.rows()]
        return [f"Step {self.step}: {self.title}", *rows, self.advice]


def read_verdict(folder: RunFolder, step: int | None = None) -> Verdict | None:
    """Returns the verdict on the model of a step, by the last validation up to it; None if none has a score.

    Args:
        step: By default that of the exported model.
    """
    if step is None:
        step = read_json(folder.export / EXPORT_INFO)["step"]
    plan = read_json(folder.plan) if folder.plan.exists() else {}
    records = [r for r in read_jsonl(folder.metrics) if r["step"] <= step and "probe/mean" in r]
    if not records or "measure" not in plan:
        return None
    first, last = records[0], records[-1]
    changes = {name: change_of(last, name) for name in EMBEDDINGS if f"probe/{name}_change" in last}
    return Verdict(
        step=last["step"],
        measure=plan["measure"],
        reference=plan["reference"],
        before=first[f"probe/{plan['reference']}"],
        scores={name: last[f"probe/{name}"] for name in changes},
        changes=changes,
    )


def change_of(record: Mapping[str, float], name: str) -> Difference:
    """Returns the change of an embedding that a validation has recorded; ends that are not finite are not recorded."""
    key = f"probe/{name}_change"
    return Difference(record[key], record.get(f"{key}_low", -inf), record.get(f"{key}_high", inf))
