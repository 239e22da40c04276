"""Metrics against plain loops, the arithmetic of a step against torch's own count, and what is written where."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from multicls import MultiClsBertConfig, MultiClsBertForPreTraining
from multicls.console import with_clock
from multicls.errors import UserError
from multicls.files import read_jsonl
from multicls.modeling_multicls import mcqt_loss, part_scores
from multicls.settings import load_settings
from pretrain.batches import MicroBatch
from pretrain.flops import known_peak_tflops, throughput, training_flops
from pretrain.log import Log, console_line, validation_line
from pretrain.metrics import MetricSums, collapses, loss_terms, means, measure
from pretrain.settings import PretrainSettings
from tests.pretrain.conftest import Launch, records
from tests.pretrain.tools import micro_batch_of

LENGTH, EXAMPLES = 16, 4


def model(facets: int, hard_negatives: bool = True, **sizes: int) -> MultiClsBertForPreTraining:
    shape: dict[str, Any] = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    shape |= {"intermediate_size": 16, "attn_implementation": "eager", **sizes}
    config = MultiClsBertConfig(num_facets=facets, hard_negatives=hard_negatives, **shape)
    torch.manual_seed(0)
    return MultiClsBertForPreTraining(config).eval()


def micro_batch(seed: int, facets: int, parts: int, padded: bool = True) -> dict[str, Tensor]:
    """Random ids and targets; with `padded`, sequences of different lengths and some parts of a single run."""
    random = torch.Generator().manual_seed(seed)
    rows = parts * EXAMPLES
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=random) if padded else LENGTH
    ids = torch.randint(5, 50, (rows, LENGTH), generator=random)
    real = (torch.arange(LENGTH) < lengths).expand(rows, LENGTH).long()
    chosen = (torch.rand(rows, LENGTH, generator=random) < 0.3) & (torch.arange(LENGTH) > facets) & real.bool()
    orders = torch.randint(0, 2, (rows,), generator=random)
    return {
        "input_ids": ids * real,
        "attention_mask": real,
        "labels": torch.where(chosen, ids, -100),
        "tfidf_labels": 10 * torch.rand(rows, LENGTH - facets, generator=random),  # padding has targets: left out
        "so_labels": torch.where(torch.rand(rows, generator=random) < 0.3, -100, orders) if padded else orders,
    }


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


def normalizers_of(batches: list[MicroBatch]) -> dict[str, Tensor]:
    """Shares of the whole step, as in training."""
    names = ("mlm", "tfidf", "so")
    return {name: torch.tensor(sum(batch.counts[name] for batch in batches) / len(batches)) for name in names}


def terms_of(network: MultiClsBertForPreTraining, batch: MicroBatch, normalizers: dict[str, Tensor]) -> Any:
    outputs = network(**batch.inputs, normalizers=normalizers)
    return loss_terms(outputs.losses, batch, normalizers) | measure(outputs, batch, normalizers)


def totals_of(network: MultiClsBertForPreTraining, inputs: list[dict[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Sums and counts as training gathers them."""
    batches = [micro_batch_of(batch, network.config.num_parts) for batch in inputs]
    sums, normalizers = MetricSums(), normalizers_of(batches)
    for batch in batches:
        sums.add(terms_of(network, batch, normalizers))
    return sums.totals(torch.device("cpu"))


def plain_loop(network: MultiClsBertForPreTraining, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Computes the metrics one sequence, token and pair after the other."""
    facets, parts = network.config.num_facets, network.config.num_parts
    seen: dict[str, list[float]] = {}
    targets, predictions = [], []
    squares, freedom = [0.0] * max(facets, 1), 0
    pairs: dict[tuple[int, int], int] = {}
    for batch in batches:
        outputs = network(**batch)
        logits = iter(outputs.mlm_logits)
        embeddings = outputs.facet_embeddings.double()
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            seen.setdefault("data/tokens_per_sequence", []).append(length)
            for place, label in enumerate(batch["labels"][row].tolist()):
                if label != -100:
                    seen.setdefault("acc/mlm", []).append(int(next(logits).argmax()) == label)
                if place < length and not 1 <= place <= facets:
                    text = place if place == 0 else place - facets
                    targets.append(float(batch["tfidf_labels"][row, text]))
                    predictions.append(float(outputs.tfidf[row, text]))
            if (order := int(batch["so_labels"][row])) != -100:
                seen.setdefault("acc/so", []).append(int(outputs.so_logits[row].argmax()) == order)
            for name, vectors in (
                ("", embeddings[row]),
                ("_hidden", outputs.last_hidden_state[row, 1 : 1 + facets].double()),
            ):
                for i in range(facets if facets > 1 else 0):
                    for j in set(range(facets)) - {i}:
                        cosine = torch.cosine_similarity(vectors[i], vectors[j], dim=0)
                        seen.setdefault(f"facets/mean_cosine{name}", []).append(float(cosine))
        for k in range(max(facets, 1)):
            unit = torch.stack([row[k] / row[k].norm() for row in embeddings])
            squares[k] += float(unit.var(dim=0).sum()) * (len(unit) - 1)
        freedom += len(embeddings) - 1
        for start in [0, 2 * EXAMPLES][: parts - 1]:
            scores = outputs.mcqt_scores[0 if start == 0 else 1]
            for query in range(EXAMPLES):
                seen.setdefault("acc/mcqt", []).append(int(scores[query].argmax()) == query)
                mine, right = embeddings[start + query], embeddings[EXAMPLES + query]
                cosines = {
                    (i, j): float(torch.cosine_similarity(mine[i], right[j], dim=0))
                    for i in range(len(mine))
                    for j in range(len(right))
                }
                best = max(cosines, key=lambda pair: cosines[pair])
                pairs[best] = pairs.get(best, 0) + 1
    expected = {name: sum(values) / len(values) for name, values in seen.items()}
    expected |= {f"facets/variance_{k + 1}": total / freedom for k, total in enumerate(squares)}
    mean = sum(targets) / len(targets)
    residual = sum((y - p) ** 2 for y, p in zip(targets, predictions, strict=True))
    expected["loss/tfidf"] = residual / len(targets)
    expected["r2/tfidf"] = 1 - residual / sum((y - mean) ** 2 for y in targets)
    if facets > 1:
        shares = [wins / sum(pairs.values()) for wins in pairs.values()]
        expected["facets/top_pair_share"] = max(shares)
        expected["facets/pair_entropy"] = -sum(s * math.log(s) for s in shares) / math.log(facets**2)
    return expected


@pytest.mark.parametrize(("facets", "hard_negatives"), [(3, True), (2, False), (1, True), (0, False)])
def test_metrics_equal_a_plain_loop(facets: int, hard_negatives: bool) -> None:
    network = model(facets, hard_negatives)
    batches = [micro_batch(seed, facets, 3 if hard_negatives else 2) for seed in range(3)]
    with torch.no_grad():
        found, expected = means(totals_of(network, batches)), plain_loop(network, batches)
    assert found.keys() == expected.keys() | {"loss/mlm", "loss/so", "loss/mcqt"}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_sums_of_two_ranks_are_those_of_one() -> None:
    """Micro-batches that are not counted add nothing, whatever their values; a state goes on to the bit."""
    network, device = model(3), torch.device("cpu")
    batches = [micro_batch_of(micro_batch(seed, 3, 3), 3) for seed in range(4)]
    normalizers = normalizers_of(batches)
    together, halves = MetricSums(), [MetricSums(), MetricSums()]
    for number, batch in enumerate(batches):
        terms = terms_of(network, batch, normalizers)
        together.add(terms)
        halves[number % 2].add(terms)
        halves[number % 2].add({name: (value * math.nan, count) for name, (value, count) in terms.items()}, False)
    halves[0].add_state(json.loads(json.dumps(halves[1].state())), device)
    expected = means(together.totals(device))
    assert means(halves[0].totals(device)) == pytest.approx(expected, rel=1e-12)
    copied = MetricSums()
    copied.add_state(json.loads(json.dumps(together.state())), device)
    assert means(copied.totals(device)) == expected


def test_groups_are_each_others_negatives_and_no_more() -> None:
    network, group = model(3), 2
    inputs = micro_batch(0, 3, 3)
    outputs = network(**inputs, group_size=group)
    accuracy = measure(outputs, micro_batch_of(inputs, 3), normalizers_of([micro_batch_of(inputs, 3)]), group)[
        "acc/mcqt"
    ]
    parts = [part.split(group) for part in outputs.facet_embeddings.chunk(3)]
    rows = [torch.cat(found) for found in zip(*parts, strict=True)]
    scores = [part_scores(one, 3, 0.1) for one in rows]
    losses = torch.stack([mcqt_loss(one) for one in scores])
    torch.testing.assert_close(outputs.losses["mcqt"], losses.mean())
    hits = sum(int((d.argmax(1) == torch.arange(group)).sum()) for one in scores for d in one if d is not None)
    assert (int(accuracy[0]), accuracy[1]) == (hits, 8)
    assert abs(outputs.losses["mcqt"] - network(**inputs).losses["mcqt"]) > 1e-3  # control: one group of four


def test_collapsed_facets_show() -> None:
    """A facet head of zeros gives every sequence and facet the same embedding, its bias: nothing varies."""
    network = model(3)
    healthy = means(totals_of(network, [micro_batch(0, 3, 3)]))
    assert healthy["facets/mean_cosine"] < 0.9 and healthy["facets/variance_1"] > 0.01
    torch.nn.init.zeros_(network.bert.facet_head.dense.weight)
    torch.nn.init.ones_(network.bert.facet_head.LayerNorm.bias)
    collapsed = means(totals_of(network, [micro_batch(0, 3, 3)]))
    assert collapsed["facets/mean_cosine"] == pytest.approx(1) and collapsed["facets/variance_1"] == pytest.approx(0)
    assert collapsed["facets/top_pair_share"] == 1 and collapsed["facets/pair_entropy"] == 0
    assert collapses(healthy) == [] and [problem.partition(" (")[0] for problem in collapses(collapsed)] == [
        "the facets of a text are nearly the same",
        "3 of 3 facets are nearly the same for every text",
    ]
    assert collapsed["facets/mean_cosine_hidden"] == pytest.approx(healthy["facets/mean_cosine_hidden"])


def test_targets_that_are_all_the_same_have_no_r2() -> None:
    batch = micro_batch(0, 2, 3)
    batch["tfidf_labels"] = torch.full_like(batch["tfidf_labels"], 3.3)
    assert "r2/tfidf" not in means(totals_of(model(2), [batch]))


@pytest.mark.parametrize("facets", [4, 0])
def test_flops_of_a_step_are_those_that_torch_counts(facets: int) -> None:
    """The pooler, which no loss needs, and the comparisons of MCQT are counted by hand here."""
    network = model(facets, hidden_size=32, vocab_size=100, num_attention_heads=4)
    batch = micro_batch(0, facets, 3, padded=False)
    rows, hidden, embeddings = len(batch["input_ids"]), 32, max(facets, 1)
    with FlopCounterMode(display=False) as counter:
        network(**batch).loss.backward()
    pooler = 2 * rows * hidden**2
    comparisons = 6 * 2 * EXAMPLES * 2 * EXAMPLES * hidden * (embeddings**2 + 1)
    ours = training_flops(
        network.config,
        sequences=rows,
        tokens=rows * LENGTH,
        squared_lengths=rows * LENGTH**2,
        masked=int((batch["labels"] != -100).sum()),
    )
    assert counter.get_total_flops() == ours + pooler + comparisons


def test_flops_of_bert_base_are_six_a_parameter_and_token() -> None:
    """85 M parameters of the encoder's matrices; attention adds L / 6D, 2.8 % at 128 tokens."""
    config = MultiClsBertConfig(num_facets=0)
    flops = training_flops(config, sequences=1, tokens=128, squared_lengths=128**2, masked=0)
    assert flops == pytest.approx(6 * 85e6 * 128 * 1.028, rel=0.01)


def test_throughput_counts_real_tokens() -> None:
    network = model(3)
    batches = [micro_batch(seed, 3, 3) for seed in range(2)]
    totals = totals_of(network, batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert tokens < 2 * 12 * LENGTH
    values = throughput(network.config, totals, seconds=4.0, peak_tflops=None)
    assert values == {
        "data/tokens": tokens,
        "speed/sequences_per_second": 2 * 12 / 4,
        "speed/tokens_per_second": tokens / 4,
    }
    shape = {"tokens": tokens, "squared_lengths": 0, "masked": 0}
    for batch in batches:
        shape["squared_lengths"] += int(batch["attention_mask"].sum(dim=1).square().sum())
        shape["masked"] += int((batch["labels"] != -100).sum())
    mfu = throughput(network.config, totals, seconds=4.0, peak_tflops=0.5)["speed/mfu"]
    assert mfu == pytest.approx(training_flops(network.config, sequences=24, **shape) / 4 / 0.5e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10", 125),
        ("NVIDIA A100X", None),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some other GPU", None),
    ],
)
def test_peaks_of_gpus(name: str, peak: float | None) -> None:
    assert known_peak_tflops(name) == peak


@pytest.mark.parametrize(("steps", "large"), [(40, 1.0), (635_000, 12.345)])
def test_lines_fit_the_console(steps: int, large: float) -> None:
    values = {"loss/total": 3 * large, "loss/mlm": large, "loss/tfidf": large, "loss/so": 0.6931, "loss/mcqt": large}
    values |= {"optim/lr": 1.94e-5, "optim/grad_norm": 10 * large, "speed/sequences_per_second": 812 * large}
    values |= {"speed/data_wait": 0.01, "speed/mfu": 0.381, "memory/peak_gb": 13.98, "acc/mcqt": 0.71, "acc/so": 0.62}
    values |= {"facets/variance_1": 0.5, "facets/mean_cosine": -0.12, "r2/tfidf": 0.3}
    train = with_clock(console_line(steps, steps, values, eta=123 * 3600))
    validation = with_clock(validation_line(steps, values))
    for line in (train, validation):
        assert len(line) <= 120 and "\n" not in line and "so 0.693" in line and "variance" not in line
    assert re.match(rf"\d\d:\d\d:\d\d step {steps}/{steps}  loss ", train) and train.endswith("seq/s  eta 123h00")
    assert "lr 1.9e-05" in train and ("gnorm" in train) == (steps == 40) and "data" not in train
    assert validation.endswith("acc mcqt 0.71 so 0.62  cos -0.12") and f" step {steps}  validation " in validation


def test_waiting_for_data_is_shown_where_it_is_long() -> None:
    values = {"loss/total": 1.0, "loss/mlm": 1.0, "speed/data_wait": 0.2, "speed/mfu": 0.381, "memory/peak_gb": 2.0}
    assert (
        console_line(7, 90, values, eta=65) == "step 7/90  loss 1.00 (mlm 1.00)  mfu 38%  data 20%  mem 2.0G  eta 1m05s"
    )


WANDB = """
import json, pathlib
class Run:
    def __init__(self, arguments):
        self.path = pathlib.Path(arguments["dir"]) / "calls.jsonl"
        self.note(["init", arguments])
    def note(self, call):
        with open(self.path, "a") as file:
            file.write(json.dumps(call) + "\\n")
    def log(self, values, step):
        self.note(["log", step, values])
    def finish(self):
        self.note(["finish"])
def init(**arguments):
    if arguments["project"] == "closed":
        raise RuntimeError("no login")
    return Run(arguments)
"""


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    assert wandb_settings().run.wandb_project == "mine"
    folder = tmp_path / "run"

    def start(resumed_step: int) -> dict[str, Any]:
        log = Log(folder, True, resumed_step, wandb_project="mine", config={"train.seed": 1})
        log.record(resumed_step + 1, "train", {"loss/total": 2.5})
        log.close()
        opened, logged, finished = (list(call) for call in read_jsonl(folder / "calls.jsonl")[-3:])
        assert logged == ["log", resumed_step + 1, {"train/loss/total": 2.5}] and finished == ["finish"]
        arguments: dict[str, Any] = opened[1]  # type: ignore[assignment]
        return arguments

    first, resumed, fresh = start(0), start(4), start(0)
    assert first["project"] == "mine" and first["name"] == "run" and first["config"] == {"train.seed": 1}
    assert resumed["id"] == first["id"] != fresh["id"] and resumed["resume"] == "allow"
    Log(folder, False, 0, wandb_project="mine").close()  # other ranks: nothing
    assert len(read_jsonl(folder / "calls.jsonl")) == 9
    with pytest.raises(UserError, match=r"run\.wandb_project = closed: no login.*WANDB_MODE=offline"):
        Log(folder, True, 0, wandb_project="closed")


def wandb_settings() -> PretrainSettings:
    flags = {"model.checkpoint": "m", "data.corpus": "c", "run.wandb_project": "mine"}
    return load_settings(PretrainSettings, flags=flags)


def test_wandb_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.settings.find_spec", lambda name: None)
    with pytest.raises(UserError, match="run.wandb_project = 'mine'.*pip install wandb"):
        wandb_settings()


@pytest.mark.launcher
@pytest.mark.slow
def test_a_run_with_peak_and_wandb(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    flags = ["--steps", "2", "--set", "run.peak_tflops=0.001", "--set", "run.wandb_project=mine"]
    done = launch(tmp_path / "run", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    train, validation = (records(tmp_path / "run", split) for split in ("train", "validation"))
    for line in train:
        assert line["speed/mfu"] > 0
        assert line["data/tokens"] == pytest.approx(line["data/tokens_per_sequence"] * 18)
        assert line["speed/tokens_per_second"] * line["speed/seconds_per_step"] == pytest.approx(line["data/tokens"])
    calls: list[Any] = list(read_jsonl(tmp_path / "run" / "calls.jsonl"))
    assert calls[0][0] == "init" and calls[0][1]["config"]["train"]["steps"] == 2 and calls[-1] == ["finish"]
    assert [call[1] for call in calls[1:-1]] == [0, 1, 2, 2]
    last = {f"validation/{key}": value for key, value in validation[-1].items() if key not in ("step", "split")}
    assert calls[-2] == ["log", 2, last]
