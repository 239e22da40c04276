"""Pages and figures hold what the records say."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import pages
from benchmarks.records import Origin, Record, Records, outcome
from multicls.errors import UserError
from multicls.evaluation import Scores, average, compare


def record(domain: str, system: str, seed: int, right: float, length: int = 64) -> Record:
    """Returns a record of 20 draws on 200 rows, of which 100 are scored, `right` of them correctly."""
    generator = np.random.default_rng([seed, len(domain), len(system)])
    draws = (generator.random((20, 200)) < right).astype(float)
    for draw in draws:
        draw[generator.permutation(200)[:100]] = np.nan
    kept = outcome(Scores(draws[:0], draws, np.arange(200), 100))
    views = dict.fromkeys(("mean", "mean+topics", "mean+facets+topics"), kept)
    origin = Origin(command="c", machine="m", threads="1", date="2020-01-01", commit="0")
    values = {"model": "m", "data": "d", "max_length": length, "origin": origin}
    outcomes = {100: views, 25: views}
    return Record.model_validate(
        {"domain": domain, "system": system, "seed": seed, "results": outcomes, **values}
    )


@pytest.fixture
def records() -> Records:
    """Records of the original model, and of three seeds that are right more often."""
    found = [record(domain, "original_64", 1, 0.6) for domain in pages.JUDGES]
    found += [
        record(domain, "adapted_64", seed, 0.8) for domain in pages.JUDGES for seed in (1, 2, 3)
    ]
    return Records(found)


def test_the_primary_comparison_by_hand(records: Records) -> None:
    changes = []
    for domain in pages.JUDGES:
        ours, theirs = (records.scores(domain, *side, labels=100) for side in pages.PRIMARY)
        assert (len(ours), len(theirs)) == (3, 1)
        changes.append(compare(ours, theirs))
    by_hand = average(changes)
    assert by_hand.mean == pytest.approx(0.2, abs=0.05)
    half = 100 * (by_hand.high - by_hand.mean)
    shown = f"{100 * by_hand.mean:+.1f} ± {half:.1f}"
    assert pages.primary(records).splitlines()[3].endswith(f"| {shown} |")
    longer = [record(domain, "adapted_64", 1, 0.8, length=256) for domain in pages.JUDGES]
    with pytest.raises(UserError, match="measured at different lengths"):
        pages.primary(Records([*records.records[:3], *longer]))


def test_a_record_that_is_there_twice_is_no_seed(records: Records) -> None:
    with pytest.raises(UserError, match="there twice, and would count as seeds: .*original_64"):
        Records([*records.records, records.records[0]])


def test_a_page_gets_what_its_marks_name(records: Records) -> None:
    page = "The gain:<!-- results:primary -->?<!-- /results -->\n<!-- results:systems -->\n"
    page += "| old |\n<!-- /results -->\nThe end.\n"
    once = pages.filled(page, records)
    assert f"<!-- results:primary -->{pages.primary(records)}<!-- /results -->" in once
    score = records.scores("medquad", *pages.ORIGINAL, labels=100)[0].mean
    assert f"| original model, 64 tokens | mean | {100 * score:.1f} % |" in once
    assert "| old |" not in once
    assert "SetFit" not in once, "it has no record"
    assert pages.filled(once, records) == once and once.endswith("The end.\n")
    with pytest.raises(UserError, match="results:primray: there are systems, primary"):
        pages.filled(page.replace("primary", "primray"), records)


def test_diagrams_are_those_of_their_source() -> None:
    found = dict(pages.diagrams())
    assert set(found) == {"how.svg", "flow.svg", "choose.svg", "method.svg"}
    for name, svg in found.items():
        assert (pages.IMAGES / name).read_text(encoding="utf-8") == svg, name
    assert "W<tspan" in found["method.svg"], "subscripts are drawn as such"


def test_pages_hold_what_the_records_say() -> None:
    records = Records.read(pages.RESULTS)
    for path in pages.PAGES:
        text = path.read_text(encoding="utf-8")
        assert pages.filled(text, records) == text, f"{path.name} is old: run `make results`"


@pytest.mark.parametrize("ending", pages.THEMES)
def test_figures_of_records(records: Records, tmp_path: Path, ending: str) -> None:
    drawn = {path.name: path.read_text() for path in pages.draw(records, tmp_path)}
    assert {f"gain{ending}.svg", f"labels{ending}.svg"} <= drawn.keys()
    assert not [name for name in drawn if "minutes" in name], "no record has minutes"
    ink = pages.THEMES[ending][0]
    assert ink in drawn[f"gain{ending}.svg"] and ">average<" in drawn[f"gain{ending}.svg"]


def test_the_probe_of_a_run_is_drawn_with_its_band(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PROBES", tmp_path)
    axes = Figure().subplots()
    assert not pages.draw_probe(axes, records, pages.THEMES[""][2])
    changes = {"mean+topics": {0: 0.04}, "mean+facets+topics": {50: 0.06, 100: 0.05}}
    lines = [
        {
            "step": step,
            f"probe/{view}_change": change,
            f"probe/{view}_change_low": change - 0.03,
            f"probe/{view}_change_high": change + 0.03,
        }
        for view, by_step in changes.items()
        for step, change in by_step.items()
    ]
    (tmp_path / "reuters.jsonl").write_text("\n".join(map(json.dumps, lines)))
    axes = Figure().subplots()
    assert pages.draw_probe(axes, records, pages.THEMES[""][2])
    assert np.array(axes.lines[0].get_data()).T.tolist() == [[0, 4], [50, 6], [100, 5]]
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (pytest.approx(1), pytest.approx(9))
