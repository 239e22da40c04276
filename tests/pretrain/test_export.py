"""Any checkpoint becomes a model: without a GPU, without a process group, and bit for bit what the run exports."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer

from multicls.build import build
from multicls.errors import UserError
from multicls.files import append_jsonl, locked, read_json, write_json
from pretrain import export
from pretrain.card import TAGS
from pretrain.folder import RunFolder
from tests.pretrain.conftest import Fork, logs, records
from tests.processes import completed

pytestmark = pytest.mark.launcher
MILESTONES = ("--steps", "4", "--run.milestone_every", "2")


@pytest.fixture(scope="module")
def stopped(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a milestone at step 2 that was killed, resumed, and stopped after step 3 of 4; step 2 is exported."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    launches = {"accident": "killed in a step", "step": 2}, {"accident": "SIGTERM", "step": 2}
    assert fork(folder, *launches, flags=MILESTONES) == [[-9], [0]], logs(folder, 1)
    assert not (folder / "hf").exists(), "a stop leaves no time to export"
    export_to(folder / "hf", folder, "--step", "2")
    return folder


def export_to(folder: Path, run: Path, *flags: str) -> Path:
    assert export.main([str(run), "--output", str(folder), *flags]) == 0
    return folder


def step_of(folder: Path) -> int:
    return int(read_json(folder / "export.json")["step"])


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns metadata and body of a folder's card, whose metadata the Hub can read."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    _, block, body = text.split("---\n", 2)
    metadata = yaml.safe_load(block)
    assert ModelCard(text, ignore_metadata_errors=False).data.to_dict() == metadata
    assert text.startswith("---\n") and all(metadata.values()), "no field is empty"
    for repository in [*metadata.get("datasets", []), metadata.get("base_model", "a/b")]:
        validate_repo_id(repository)
    return metadata, body


def assert_same_files(folder: Path, other: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "README.md", "model.safetensors"}
    assert not [n for n in names if (folder / n).read_bytes() != (other / n).read_bytes()]


FROZEN = ("--objective.so", "0")  # weights that no loss trains
CASES = [(2, 2, "fp32", ())]
SLOW = [(3, 2, "fp32", FROZEN), (1, 1, "fp32", FROZEN), (1, 2, "bf16", ()), (3, 2, "bf16", ())]


@pytest.mark.parametrize(
    ("stage", "ranks", "precision", "flags"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_checkpoint_gives_what_the_run_exports(
    fork: Fork, tmp_path: Path, stage: int, ranks: int, precision: str, flags: tuple[str, ...]
) -> None:
    """An export holds the engine's fp32 weights, in each layout of ZeRO, with and without frozen weights."""
    config, run = read_json(f"ds_configs/zero{stage}.json"), tmp_path / "run"
    if stage == 3:  # some parameters below it, some above
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    write_json(tmp_path / "ds.json", config)
    flags += ("--config", str(tmp_path / "ds.json"), "--train.precision", precision, "--steps", "2")
    launch = {"ranks": ranks, "accident": "note the engine's weights"}
    assert fork(run, launch, flags=flags) == [[0] * ranks], logs(run)
    speed, time = "speed/sequences_per_second", "speed/seconds_per_step"
    assert [r[speed] * r[time] for r in records(run, "train")] == pytest.approx([18, 18])
    before = dist.is_initialized()  # by another file's test in this process
    assert_same_files(export_to(tmp_path / "model", run), run / "hf")
    assert dist.is_initialized() == before, "an export needs no process group"
    exported = load_file(tmp_path / "model" / "model.safetensors")
    engine = torch.load(tmp_path / "engine_weights.pt")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    assert all(torch.equal(tensor, engine[name]) for name, tensor in exported.items())
    load = AutoModelForPreTraining.from_pretrained
    model, report = load(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.slow
def test_the_cards_snippets_run_where_the_folder_lies(stopped: Path, tmp_path: Path) -> None:
    _, text = card_of(stopped / "hf")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3 and str(stopped) not in text
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path)
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = completed(command, cwd=stopped / "hf", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([2, 3, 32])" in done.stdout and "tensor([[" in done.stdout


def test_a_step_can_be_chosen(stopped: Path, tmp_path: Path) -> None:
    with locked(stopped):  # as a training process does
        assert step_of(export_to(tmp_path / "model", stopped)) == 3
        with pytest.raises(UserError, match="the training writes this folder"):
            export.main([str(stopped), "--output", str(stopped / "hf")])
    export_to(tmp_path / "model", stopped, "--step", "2")  # replaces the other one
    assert_same_files(tmp_path / "model", stopped / "hf")
    _, text = card_of(tmp_path / "model")
    assert "2 of 4 planned optimizer steps" in text and "after step 0" in text


def test_an_embedding_of_parts_reads_whole_texts(fork: Fork, tmp_path: Path) -> None:
    """Topics read whole texts in sentence-transformers, and the encoder as much as before."""
    parts = "mean+facets+topics"
    assert fork(tmp_path / "run", flags=("--model.num_topics", "6", "--steps", "1")) == [[0]]
    folder = tmp_path / "run" / "hf"
    text = "bal del fil gol " * 60
    options: Any = {"device": "cpu", "trust_remote_code": True}
    texts = [text, text + "nar"]
    own = torch.from_numpy(SentenceTransformer(str(folder), **options).encode(texts))
    options["config_kwargs"] = {"embedding": parts}
    found = torch.from_numpy(SentenceTransformer(str(folder), **options).encode(texts))
    plain = AutoModel.from_pretrained(folder).eval()
    limit, tokenizer = plain.config.encoder_tokens, AutoTokenizer.from_pretrained(folder)
    assert limit == plain.config.max_tokens < len(tokenizer(text, truncation=False)["input_ids"])
    cut = tokenizer([text], truncation=True, max_length=limit, return_tensors="pt")
    with torch.inference_mode():
        expected = plain.embed_sentences(**cut)[0]
        plain.config.embedding = "mean+facets"
        together = plain.embed_sentences(**cut)[0] * (2 / 3) ** 0.5
    same: Any = {"rtol": 1e-4, "atol": 1e-5}
    for number in (0, 1):
        torch.testing.assert_close(own[number], expected, **same)
        torch.testing.assert_close(found[number, : len(together)], together, **same)
    assert not torch.allclose(found[0, len(together) :], found[1, len(together) :], atol=1e-3)
    assert parts in card_of(folder)[1]
    again: Any = build(str(folder), report=lambda line: None, num_facets=None)[0]  # for a next run
    assert again.sentence_files["sentence_bert_config.json"]["max_seq_length"] == limit


BASE = {"base_model": "google-bert/bert-base-uncased", "license": "other", "license_name": "mine"}
CORPUS = {
    "documents": 40,
    "sentences": 1200,
    "tokens": 7500,
    "language": "de",
    "sources": {"wiki|pedia": {"documents": 30, "tokens": 5000}},
    "hub_datasets": {"wiki|pedia": "wikimedia/wikipedia"},
}


def test_a_card_has_metadata_data_settings_results_no_path(stopped: Path, tmp_path: Path) -> None:
    run, info = tmp_path / "run", read_json(stopped / "model" / "export.json")
    shutil.copytree(stopped, run)
    info |= {"metadata": BASE | {"language": ["en"]}, "corpus": info["corpus"] | CORPUS}
    write_json(run / "model" / "export.json", info)
    write_json(run / "ds_config.json", {"bf16": {"enabled": True}})
    settings = (run / "settings.yaml").read_text().replace("weights: true", "weights: false")
    (run / "settings.yaml").write_text(settings)
    values = {"split": "validation", "acc/mlm": 0.5}
    for step, loss in ((3, 2.0), (4, 1.0)):
        append_jsonl(run / "metrics.jsonl", values | {"step": step, "loss/mlm": loss})
    data, text = card_of(export_to(tmp_path / "model", run))
    fixed: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "feature-extraction"}
    fixed["tags"] = [*TAGS, "fill-mask"]
    assert data == BASE | fixed | {"language": ["en", "de"], "datasets": ["wikimedia/wikipedia"]}
    before = records(run, "validation")[0]["loss/mlm"]
    tokens = sum(record["data/tokens"] for record in records(run, "train"))
    for expected in (
        "40 documents, 1,200 sentences, 7,500 tokens",
        "| wiki\\|pedia | 30 | 5,000 | wikimedia/wikipedia |",
        "3 of 4 planned optimizer steps of 6 examples",
        " in bf16; ",
        f"torch {torch.__version__}",
        f"| loss/mlm | {before:.3f} | 2.000 |",
        "`acc/mcqt` 0.167",  # among 3 + 3 passages
        f"{tokens:,.0f} tokens",
        "mine, the license of the base model",
    ):
        assert expected in text, expected
    details = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert details["train"]["steps"] == 4 and "run" not in details
    assert str(tmp_path.parent) not in text


def test_a_card_without_base_model_and_validation(stopped: Path, tmp_path: Path) -> None:
    """Nor does it claim to fill masks after a run without that loss."""
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    settings = tmp_path / "run" / "settings.yaml"
    values = yaml.safe_load(settings.read_text())
    values["objective"]["mlm"] = 0.0
    settings.write_text(yaml.safe_dump(values))
    data, text = card_of(export_to(tmp_path / "model", tmp_path / "run"))
    assert not {"base_model", "license"} & data.keys()
    assert "started from random weights" in text and "Not validated yet." in text
    assert "fill" not in text.split("## Training")[0] and data["tags"] == TAGS


def damage(run: Path) -> None:
    (file,) = RunFolder(run).checkpoint(3).glob("*optim_states.pt")
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "flags", "message"),
    [
        (damage, [], "step_00000003: damaged: .*optim_states.pt"),
        (lambda run: shutil.rmtree(run / "model"), [], "model: is missing"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "no checkpoint"),
        (lambda run: None, ["--step", "0"], "steps 2, 3"),
        (lambda run: None, ["--output", "run"], "--output run: exists and is no"),
        (lambda run: (run / "settings.yaml").unlink(), [], "run: is not a run folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    stopped: Path, tmp_path: Path, harm: Callable[[Path], None], flags: list[str], message: str
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    harm(tmp_path / "run")
    before = set(tmp_path.rglob("*"))
    with contextlib.chdir(tmp_path), pytest.raises(UserError, match=message):
        export.main(["run", "--output", "out", *flags])
    assert set(tmp_path.rglob("*")) == before
