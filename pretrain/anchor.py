"""The anchor: embeddings of the passages of a run that the loss holds the model's own embedding to.

They are those of the model before training, without facets and masks, so that what it knew is kept while the facets
learn; or those of a teacher, a larger SentenceTransformer, so that the model learns to embed as it does (distillation
alone is LEAF, arXiv:2509.12539). They are computed once, before the first step, into RUN/anchor.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.examples import IGNORE_INDEX, ExampleStream
from multicls.console import progress_bar
from multicls.distributed import on_rank_0, uses_cuda
from multicls.errors import UserError
from multicls.files import atomic_write
from pretrain.batches import MicroBatch, load_steps
from pretrain.settings import PretrainSettings

EXAMPLES = 2048  # of a file, about
TURNED = 512  # examples whose passages decide how a teacher's embeddings are turned
Array = np.ndarray
Embed = Callable[[MicroBatch], Array]  # (B, D) of the texts of a micro-batch


@dataclass(frozen=True)
class Anchor:
    """The embeddings of the passages of a run's examples, in files of several steps each.

    A file holds (examples, P, D) in fp16. So a micro-batch of any size finds its own.

    Attributes:
        folder: RUN/anchor.
        steps: Length of the run.
        per_step: Examples of a step.
    """

    folder: Path
    steps: int
    per_step: int

    @property
    def steps_per_file(self) -> int:
        """Number of steps whose examples a file holds."""
        return max(1, EXAMPLES // self.per_step)

    @property
    def num_files(self) -> int:
        """Number of files."""
        return -(-self.steps // self.steps_per_file)

    def steps_of(self, number: int) -> range:
        """Returns the steps of a file."""
        start = number * self.steps_per_file
        return range(start, min(start + self.steps_per_file, self.steps))

    def path(self, number: int) -> Path:
        """Returns the path of a file."""
        return self.folder / f"{number:06d}.npy"

    def write(self, number: int, embeddings: Array) -> None:
        """Writes a file: (examples, P, D)."""
        with atomic_write(self.path(number), "wb") as file:
            np.save(file, embeddings.astype(np.float16))

    def add_to(self, batch: MicroBatch) -> MicroBatch:
        """Returns a micro-batch with `anchor_targets`, (B, D), among its inputs; its sequences are part-major."""
        size = batch.counts["examples"]
        number, first = divmod(batch.number * size, self.steps_per_file * self.per_step)
        embeddings = np.load(self.path(number), mmap_mode="r", allow_pickle=False)
        rows = embeddings[first : first + size]
        targets = torch.from_numpy(np.array(rows.swapaxes(0, 1))).flatten(0, 1)
        if uses_cuda():
            targets = targets.pin_memory()
        return replace(batch, inputs={**batch.inputs, "anchor_targets": targets})

    def add_to_steps(self, steps: Iterable[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Yields the micro-batches of each step with their targets."""
        for batches in steps:
            yield [self.add_to(batch) for batch in batches]


def prepare_anchor(
    folder: Path,
    settings: PretrainSettings,
    stream: ExampleStream,
    tokenizer: Any,
    build_base: Callable[[], tuple[Any, Any]],
    is_new: bool,
) -> Anchor | None:
    """Computes the embeddings of a new run, with progress; returns None if the run has no anchor.

    Ranks share the files. All ranks call it.

    Args:
        stream: The training examples.
        build_base: Builds the model before training, without facets, and its tokenizer.
        is_new: False if the run resumes and has its embeddings. What an earlier run left is removed.

    Raises:
        UserError: The teacher cannot be loaded.
    """
    if not settings.objective.anchor:
        return None
    anchor = Anchor(folder, settings.train.steps, settings.train.global_batch_size)
    if not is_new:
        for path in map(anchor.path, range(anchor.num_files)):
            if not path.exists():
                raise UserError(f"{path}: is missing; put it back, or set another --output_dir.")
        return anchor
    on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
    facets, rank, ranks = settings.model.num_facets, dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if uses_cuda() else "cpu")
    embed = _embed_by_model(build_base()[0], facets, device)
    if settings.model.teacher:
        teach = _embed_by_teacher(settings.model.teacher, tokenizer, facets, device)
        rotation = on_rank_0(lambda: _rotation(anchor, stream, embed, teach))
        embed = _turned(teach, rotation)
    with progress_bar(anchor.steps, "steps", "anchor", disable=rank > 0) as bar:
        for number in range(rank, anchor.num_files, ranks):
            steps = anchor.steps_of(number)
            anchor.write(number, _of_steps(anchor, steps, stream, embed))
            bar.update(ranks * len(steps))
    dist.barrier()
    return anchor


def _of_steps(anchor: Anchor, steps: range, stream: ExampleStream, embed: Embed) -> Array:
    """Returns the embeddings (examples, P, D) of some steps, from the texts that training shows, unmasked."""
    found = list[Array]()
    for (batch,) in load_steps(stream, steps, size=anchor.per_step, per_step=1, workers=0):
        rows = embed(batch)
        found.append(rows.reshape(-1, anchor.per_step, rows.shape[1]).swapaxes(0, 1))
    return np.concatenate(found)


def _texts(batch: MicroBatch, facets: int) -> dict[str, Tensor]:
    """Returns the inputs of a micro-batch without masks and facets."""
    inputs = batch.inputs
    is_masked = inputs["labels"] != IGNORE_INDEX
    whole = {name: t for name, t in inputs.items() if name in ("attention_mask", "token_type_ids")}
    whole["input_ids"] = torch.where(is_masked, inputs["labels"], inputs["input_ids"])
    return {name: torch.cat([t[:, :1], t[:, 1 + facets :]], dim=1) for name, t in whole.items()}


def _embed_by_model(model: Any, facets: int, device: torch.device) -> Embed:
    """Returns a function that embeds the texts of a micro-batch by a model without facets."""
    encoder = model.multicls.eval().to(device)

    @torch.no_grad()
    def embed(batch: MicroBatch) -> Array:
        texts = {name: tensor.to(device) for name, tensor in _texts(batch, facets).items()}
        return np.asarray(encoder.embed_sentences(**texts).float().cpu().numpy())

    return embed


def _embed_by_teacher(teacher: str, tokenizer: Any, facets: int, device: torch.device) -> Embed:
    """Returns a function that embeds the texts of a micro-batch by a SentenceTransformer."""
    from sentence_transformers import SentenceTransformer

    from multicls.build import load_problems, quiet_transformers

    with load_problems(teacher), quiet_transformers():
        model = SentenceTransformer(teacher, device=str(device), trust_remote_code=False)

    def embed(batch: MicroBatch) -> Array:
        ids = _texts(batch, facets)["input_ids"]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return np.asarray(model.encode(texts, batch_size=64, show_progress_bar=False))

    return embed


def _rotation(anchor: Anchor, stream: ExampleStream, embed: Embed, teach: Embed) -> Array:
    """Returns a rotation (E, D) of a teacher's embeddings to where the model's own lie, as near as one can.

    The teacher's are reduced to their D leading directions, and these are turned by the orthogonal Procrustes solution
    (Schoenemann, 1966): distances stay, and the model need not learn the turn.
    """
    steps = range(min(anchor.steps, -(-TURNED // anchor.per_step)))
    own, taught = (
        _unit(_of_steps(anchor, steps, stream, one).astype(np.float64)) for one in (embed, teach)
    )
    if taught.shape[1] < own.shape[1]:
        raise UserError(
            f"model.teacher: has {taught.shape[1]} dimensions, fewer than {own.shape[1]} of the model."
        )
    directions = np.linalg.svd(taught, full_matrices=False)[2][: own.shape[1]].T
    left, _, right = np.linalg.svd((taught @ directions).T @ own)
    return np.asarray(directions @ left @ right)


def _unit(embeddings: Array) -> Array:
    """Returns the embeddings of all parts, (N, D), divided by their lengths."""
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def _turned(embed: Embed, rotation: Array) -> Embed:
    return lambda batch: _unit(embed(batch)) @ rotation
