"""The report of finetune/compare.py: verdict, table, learning curve, suspicious labels and rows worth labelling."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax, softmax

from finetune.compare import Compared
from finetune.tables import aligned, markdown, write_csv
from multicls.cards import cell
from multicls.console import count
from multicls.evaluation import Rows, Scores, compare, verdict
from multicls.files import atomic_folder, atomic_write
from multicls.measures import Array, in_words, predictions_of

LISTED = 20  # rows of each list
ALIKE = 0.95  # share of equal words from which on two rows to label are one
ABOUT = "Folds: intervals are for new training rows and new rows."
ABOUT_TEST = " Test: for new rows alone."
PRECISIONS = (0.8, 0.9, 0.95, 0.99)  # of the abstention thresholds that are shown


def write_report(
    found: Compared, best: str, fitted: Any, curve: dict[int, float], output: Path
) -> list[str]:
    """Writes report.md, the lists as CSV, and the model; returns the lines for the console."""
    scores = found.scores
    rows = found.table.train
    lines = conclusion(found, best)
    table = score_table(found, best)
    suspects = suspicious_labels(rows, scores[best])
    steps = abstention(rows, scores[best])
    save_best(found, best, fitted, steps, output)
    by_size = [["training rows", rows.metric]]
    by_size += [
        [f"{size:,}", in_words(rows.metric, score)] for size, score in sorted(curve.items())
    ]
    sections = [
        ("Systems", table, ABOUT + ABOUT_TEST * bool(found.tests)),
        ("More labels", by_size, "Score of the best system by labels."),
        ("Labels to check", suspects, "The label that out-of-fold predictions doubt most, first."),
    ]
    if found.new is not None:
        next_rows = rows_to_label(found.new, fitted)
        sections.append(("Rows to label next", next_rows, "The least certain ones, none twice."))
    if rows.kind == "class":
        what = "Share of rows that get a label if only sure ones do (predict.py --precision)."
        shown = [step for step in steps if step[0] in PRECISIONS]
        shares = [["right of those", "rows with a label"]]
        shares += [[f"{100 * wanted:.0f} %", f"{100 * share:.0f} %"] for wanted, _, share in shown]
        sections.append(("Abstention", shares, what))
    with atomic_write(output / "report.md") as file:
        file.write(f"# {cell(found.name)}\n\n{cell(' '.join(lines))}\n")
        for title, listed, what in sections:
            if len(listed) > 1:
                file.write(f"\n## {title}\n\n{what}\n\n{markdown(listed)}\n")
        notes = [f"- {cell(note)}" for note in found.table.notes]
        file.write("\n## Notes on the rows\n\n" + "\n".join(notes) + "\n")
    write_csv(output / "labels_to_check.csv", suspects)
    if found.new is not None:
        write_csv(output / "rows_to_label.csv", next_rows)
    return [*(aligned(table)), "", *lines]


def conclusion(found: Compared, best: str) -> list[str]:
    """Returns in words which system to use, how good it is, and whether it is better than its rival."""
    scores, rows = found.scores, found.table.train
    what = f"{rows.metric}, folds over {count(len(rows.targets), 'labelled row')}"
    lines = [f"Use {best}: {compare(scores[best]).score()} ({what})."]
    others = [name for name in scores if name != best and name != "majority"]
    is_original = best.startswith(f"{found.original} ") or " " not in best
    rivals = [name for name in others if name.startswith(f"{found.original} ")]
    rival = next(iter(others if is_original else rivals or others), None)
    if rival:
        change = compare(scores[best], scores[rival])
        lines.append(f"{change.verdict(best, rival)}.")
    if found.tests:
        tests = found.tests
        rows_of_test = count(len(tests[best].units), "test row")
        lines.append(f"On {rows_of_test}: {compare(tests[best]).score()}")
        if rival:
            lines[-1] += f"; {compare(tests[best], tests[rival]).verdict(best, rival)}"
        lines[-1] += "."
    if "majority" in scores and best != "majority":
        change = compare(scores[best], scores["majority"])
        if verdict(change) != "better":
            lines.append(f"{change.verdict(best, 'the majority class')}: it may be guessing.")
    lines.append(f"It is fitted on all {len(rows.targets)} rows.")
    return lines


def score_table(found: Compared, best: str) -> list[list[str]]:
    """Returns the systems, the best first, with their scores and their difference to the best; a header first."""
    metric = found.table.train.metric
    header = ["system", f"{metric} (95 % interval)", f"against {best}"]
    if found.tests:
        header += [f"{metric}, test", "against it, test"]
    table = [header]
    for name, scores in found.scores.items():
        row = [name, compare(scores).score()]
        row.append("" if name == best else str(compare(scores, found.scores[best])))
        if found.tests:
            own, other = found.tests[name], found.tests[best]
            row += [compare(own).score(), "" if name == best else str(compare(own, other))]
        table.append(row)
    return table


def suspicious_labels(rows: Rows, scores: Scores) -> list[list[str]]:
    """Returns the rows whose label is the least likely by systems that have not seen it, the worst first."""
    assert scores.outputs is not None
    outputs = scores.outputs.mean(axis=0)
    if rows.kind == "score":
        doubt = np.abs(outputs[:, 0] - rows.targets)
    elif rows.kind == "class":
        every = np.arange(len(outputs))
        logs = log_softmax(outputs, axis=1)
        doubt = logs.max(axis=1) - logs[every, rows.targets.astype(int)]
    else:
        doubt = np.where(rows.targets == 1, -outputs, outputs).max(axis=1)
    names = names_of(rows, predictions_of(rows.kind, outputs))
    labels = names_of(rows, rows.targets)
    worst = [row for row in np.argsort(-doubt, kind="stable")[:LISTED] if names[row] != labels[row]]
    table = [[rows.places[n], labels[n], names[n], " | ".join(rows.texts[n])] for n in worst]
    return [["place", "label", "predicted", "text"], *table]


def rows_to_label(new: Rows, fitted: Any) -> list[list[str]]:
    """Returns rows without labels whose label is the least certain; of rows that are nearly equal only one."""
    outputs = fitted.predict(new)
    if new.kind == "score":
        return [["place", "text"]]  # a score has no certainty here
    if new.kind == "class":
        ordered = np.sort(softmax(outputs, axis=1), axis=1)
        margin = ordered[:, -1] - ordered[:, -2]
    else:
        margin = np.abs(outputs).min(axis=1)
    chosen, words = list[int](), list[set[str]]()
    for row in np.argsort(margin, kind="stable").tolist():
        own = set(re.findall(r"\w+", " ".join(new.texts[row]).casefold()))
        if all(len(own & other) < ALIKE * max(1, len(own | other)) for other in words):
            chosen.append(row)
            words.append(own)
        if len(chosen) == LISTED:
            break
    names = names_of(new, predictions_of(new.kind, outputs))
    table = [[new.places[n], names[n], " | ".join(new.texts[n])] for n in chosen]
    return [["place", "predicted", "text"], *table]


def names_of(rows: Rows, values: Array) -> list[str]:
    """Returns labels or predictions as people read them: names, several with commas, or scores."""
    if rows.kind == "score":
        return [f"{value:g}" for value in values]
    if rows.kind == "class":
        return [rows.classes[int(value)] for value in values]
    classes = np.array(rows.classes, dtype=object)
    return [", ".join(classes[marks == 1]) for marks in values]


def abstention(rows: Rows, scores: Scores) -> list[list[float]]:
    """Returns [precision, threshold, share] of classes, from out-of-fold probabilities, ascending.

    Of the rows whose highest probability reaches the threshold, at least `precision` are right, and they are `share`
    of all.
    """
    if rows.kind != "class" or scores.outputs is None:
        return []
    outputs = np.concatenate(list(scores.outputs))
    confidence = softmax(outputs, axis=1).max(axis=1)
    right = outputs.argmax(axis=1) == np.tile(rows.targets, len(scores.outputs))
    order = np.argsort(-confidence, kind="stable")
    precision = right[order].cumsum() / np.arange(1, len(order) + 1)
    steps = list[list[float]]()
    for wanted in [percent / 100 for percent in range(50, 100)]:
        if len(reached := np.flatnonzero(precision >= wanted)):
            last = int(reached[-1])
            steps.append([wanted, float(confidence[order[last]]), (last + 1) / len(order)])
    return steps


def save_best(
    found: Compared, best: str, fitted: Any, steps: list[list[float]], output: Path
) -> None:
    """Saves the fitted system in `output`/model with all that it needs."""
    from finetune.saved import LOADERS, copy_encoder, write_record

    rows, (name, _, _) = found.table.train, best.partition(" ")
    loader = next(key for key, kind in LOADERS.items() if isinstance(fitted, kind))
    more: dict[str, Any] = {"name": best, "score": compare(found.scores[best]).score()}
    with atomic_folder(output / "model") as fresh:
        fitted.save(fresh)
        if loader == "linear":
            more["max_length"] = found.models[name].max_length
            copy_encoder(fresh, found.models[name].folder, found.topics[name])
        more["abstention"] = steps
        write_record(fresh, loader, rows.kind, rows.classes, found.table.fields, **more)
