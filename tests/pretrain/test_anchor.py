"""The anchor: what it holds the model to, the same for any micro-batches, ranks and restarts."""

from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_prep.examples import ExampleStream
from multicls.errors import UserError
from pretrain.anchor import Anchor, _rotation, _texts
from pretrain.batches import MicroBatch, load_steps
from pretrain.export import model_before
from pretrain.folder import RunFolder
from tests.encoders import WORDS
from tests.pretrain.conftest import Fork, logs, records, weights
from tests.pretrain.tools import tiny_model

FLAGS = ("--model.random_weights", "false", "--objective.anchor", "5")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_loss_is_the_cosine_distance_of_the_own_embedding(pooling: str) -> None:
    model = tiny_model(facets=2).eval()
    model.config.pooling = pooling
    ids = torch.randint(5, 97, (6, 12))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    targets = torch.randn(6, 16)
    out = model(ids, mask, anchor_targets=targets, objectives=("anchor",))
    rows = [hidden[keep.bool()] for hidden, keep in zip(out.last_hidden_state, mask, strict=True)]
    # Position 0 is [CLS], 1 and 2 are facets.
    own = [row[0] if pooling == "cls" else torch.cat([row[:1], row[3:]]).mean(0) for row in rows]
    wanted = 1 - F.cosine_similarity(torch.stack(own), targets).mean()
    torch.testing.assert_close(out.loss, wanted)
    assert out.losses.keys() == {"anchor"}
    assert not model(ids, mask, objectives=("anchor",)).losses  # a validation has no targets


def test_texts_are_those_before_masks_and_facets(stream: ExampleStream) -> None:
    (batch,) = next(load_steps(stream, range(1), size=6, per_step=1, workers=0))
    texts = _texts(batch, facets=3)["input_ids"]
    masked = batch.inputs["input_ids"][:, [0, *range(4, 32)]]
    labels = batch.inputs["labels"][:, [0, *range(4, 32)]]
    assert texts.shape == masked.shape and (texts != masked).any()
    assert torch.equal(texts[labels != -100], labels[labels != -100])
    assert torch.equal(texts[labels == -100], masked[labels == -100])
    assert not torch.isin(texts, torch.tensor([1, 2, 3])).any()


def test_each_micro_batch_finds_its_own_targets(stream: ExampleStream, tmp_path: Path) -> None:
    """Whatever its size; a file ends within a step's examples for none."""
    anchor = Anchor(tmp_path, steps=500, per_step=6)
    assert anchor.num_files == 2
    numbers = np.arange(500 * 6 * 3, dtype=np.float32).reshape(3000, 3, 1)
    for number in (0, 1):
        steps = anchor.steps_of(number)
        anchor.write(number, (numbers % 2000)[steps.start * 6 : steps.stop * 6])
    for size in (3, 6):
        load = partial(load_steps, stream, range(340, 343), size=size, workers=0)
        for batch in chain.from_iterable(load(per_step=6 // size)):
            found = anchor.add_to(batch).inputs["anchor_targets"]
            own = numbers[batch.number * size : (batch.number + 1) * size] % 2000
            assert found[:, 0].tolist() == own.swapaxes(0, 1).ravel().tolist()


def test_a_teacher_is_turned_to_the_model(stream: ExampleStream, tmp_path: Path) -> None:
    """One that differs by a rotation into more dimensions gives back the model's own embeddings."""
    anchor = Anchor(tmp_path, steps=60, per_step=6)
    table = np.random.default_rng(0).normal(size=(1000, 8))
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0][:8]

    def embed(batch: MicroBatch) -> np.ndarray:
        return np.asarray(table[_texts(batch, 3)["input_ids"].numpy()].mean(axis=1))

    rotation = _rotation(anchor, stream, embed, lambda batch: 3 * embed(batch) @ turn)
    np.testing.assert_allclose(turn @ rotation, np.eye(8), atol=1e-9)
    with pytest.raises(UserError, match="has 4 dimensions, fewer than 8"):
        _rotation(anchor, stream, embed, lambda batch: embed(batch)[:, :4])


def test_it_keeps_the_embedding_and_resumes_to_the_bit(
    fork: Fork, tiny_corpus: Path, tmp_path: Path
) -> None:
    rows, ends = tmp_path / "rows.csv", {}
    lines = [f"{WORDS[n % 7]} {WORDS[n % 11]} {WORDS[n % 5]},{n % 2}" for n in range(60)]
    rows.write_text("\n".join(["text,label", *lines]))
    flags = (*FLAGS, "--probe_file", str(rows), "--train.learning_rate", "1e-3")
    for name, launches, more in (
        ("without", [{}], ("--objective.anchor", "0")),
        ("whole", [{}], ()),
        ("resumed", [{"accident": "SIGKILL", "step": 6}, {}], ()),
        ("ranks", [{"ranks": 2}], ("--steps", "2")),
    ):
        folder = tmp_path / name / "run"
        folder.parent.mkdir()
        fork(folder, *launches, flags=(*flags, *more))
        assert (folder / "DONE").exists(), logs(folder, len(launches) - 1)
        ends[name] = records(folder, "validation")[-1]["probe/cosine_to_start"], weights(folder)
    assert ends["whole"][0] > ends["without"][0] + 0.02
    assert ends["whole"][1] == ends["resumed"][1]
    targets = [np.load(tmp_path / n / "run/anchor/000000.npy") for n in ("whole", "ranks")]
    np.testing.assert_array_equal(targets[0][:12], targets[1])
    model, _ = model_before(RunFolder(tmp_path / "whole/run"))
    assert targets[0].shape[1:] == (3, model.config.hidden_size)
    folder = tmp_path / "incomplete" / "run"
    folder.parent.mkdir()
    fork(folder, {"accident": "SIGKILL", "step": 6}, flags=flags)
    (folder / "anchor" / "000000.npy").unlink()
    assert fork(folder, flags=flags) == [[2]]
    assert "anchor/000000.npy: is missing; put it back" in logs(folder)
