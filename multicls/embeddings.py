"""Embeddings of texts by part, as the maker of a model means them, with a cache by content.

Parts: `mean` over the tokens without facets; `cls`, the last hidden state of [CLS]; `facets`, side by side; `topics` of
the whole text, whatever the encoder reads; `sentence`, what sentence-transformers returns for a model of its own, with
that model's pooling, prompt, Dense and Normalize.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from multicls.errors import UserError
from multicls.files import atomic_write, read_json, sha256_of
from multicls.measures import Array
from multicls.tokenization import model_tokenizer

# What is compared by default: parts side by side, each of which weighs the same.
EMBEDDINGS = ("mean", "cls", "facets", "mean+topics", "mean+facets+topics")
MOST_TOKENS = 256  # by default; most of what an encoder knows of a text is in its beginning
BATCH = 32  # texts of a forward pass
CHUNK = 1000  # texts that the tokenizer reads at a time
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*/model.safetensors")
OTHERS = ("*.json", "*/*.json", "vocab.txt", "*.model")


def parts_of(outputs: Any, attention_mask: Any, num_facets: int) -> dict[str, Any]:
    """Returns the embeddings of a batch by part, from a model's output: (B, D), and `facets` (B, K * D)."""
    mask = attention_mask[..., None].clone()
    mask[:, 1 : 1 + num_facets] = 0
    hidden = outputs.last_hidden_state.float()
    parts = {"mean": (hidden * mask).sum(1) / mask.sum(1), "cls": hidden[:, 0]}
    if num_facets:
        parts["facets"] = outputs.facet_embeddings.float().flatten(1)
    return parts


def embed(
    encode: Callable[..., Any],
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_length: int,
    num_facets: int = 0,
    device: Any = "cpu",
    topics: Any = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int], object] = lambda number: None,
) -> dict[str, Array]:
    """Returns the embeddings of texts by part, (N, F), in evaluation mode.

    A batch holds the same texts, and so gives the same numbers, for any number of ranks. All ranks must call it: each
    embeds every `ranks`-th batch, and all make the same number of passes, as ZeRO-3 needs.

    Args:
        encode: Called with the inputs of a batch: a model, or a DeepSpeed engine's forward.
        topics: A `TopicTable`; it reads whole texts.
        progress: Called with the number of texts after each pass.
    """
    import torch

    order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    found: dict[str, Any] = {}
    for first in range(0, len(batches), ranks):
        is_mine = first + rank < len(batches)
        rows = batches[first + rank if is_mine else first]
        fit: Any = {"max_length": max_length, "truncation": True, "padding": True}
        inputs = tokenizer([texts[row] for row in rows], **fit, return_tensors="pt").to(device)
        with torch.no_grad():
            parts = parts_of(encode(**inputs), inputs["attention_mask"], num_facets)
        for name, values in parts.items():
            if name not in found:
                found[name] = torch.zeros(len(texts), values.shape[1], device=device)
            if is_mine:
                found[name][rows] = values
        progress(min(ranks, len(batches) - first) * len(rows))
    if ranks > 1:
        for table in found.values():
            torch.distributed.all_reduce(table)  # each row has one rank's values, and zeros
    arrays = {name: table.cpu().numpy() for name, table in found.items()}
    if topics is not None:
        arrays["topics"] = topics_of(topics, tokenizer, texts)
    return arrays


def embed_rows(
    encode: Callable[..., Any], tokenizer: Any, rows: Sequence[Sequence[str]], **options: Any
) -> dict[str, Array]:
    """Returns what `embed` does for rows of one text, (N, F), or of two, (N, 2, F)."""
    found = embed(encode, tokenizer, [text for row in rows for text in row], **options)
    return by_rows(found, len(rows[0]) if rows else 1)


def by_rows(parts: Mapping[str, Array], fields: int) -> dict[str, Array]:
    """Returns embeddings of texts, (N * fields, F), by rows: (N, F), or (N, 2, F) of pairs."""
    if fields == 1:
        return dict(parts)
    return {part: values.reshape(-1, fields, values.shape[1]) for part, values in parts.items()}


def available(parts: Iterable[str]) -> list[str]:
    """Returns those of `EMBEDDINGS` that these parts make."""
    have = set(parts)
    return [name for name in EMBEDDINGS if have.issuperset(name.split("+"))]


def token_ids(tokenizer: Any, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yields the token ids of each whole text, without special tokens."""
    for start in range(0, len(texts), CHUNK):
        rows = list(texts[start : start + CHUNK])
        yield from tokenizer(rows, add_special_tokens=False, verbose=False)["input_ids"]


def topics_of(table: Any, tokenizer: Any, texts: Sequence[str]) -> Array:
    """Returns the topics of whole texts, (N, T), by a `TopicTable`."""
    import torch

    device, found = table.idf.device, list[Any]()
    ids = list(token_ids(tokenizer, texts))
    for start in range(0, len(ids), BATCH):
        rows = [torch.tensor(row, dtype=torch.long) for row in ids[start : start + BATCH]]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
        padded = torch.nn.utils.rnn.pad_sequence(rows, True)
        found.append(table(padded.to(device), mask.to(device)).cpu())
    return np.asarray(torch.cat(found).numpy())


class Embedder:
    """A frozen model that embeds texts.

    Attributes:
        parts: Names of its embeddings, without topics; the first one is the model's own.
        max_length: Tokens of a text that it reads.
        topics: Its `TopicTable`; None if it has none.
    """

    def __init__(self, folder: str | Path, max_length: int | None = None) -> None:
        import torch
        from transformers import AutoModel

        import multicls.modeling_multicls  # noqa: F401 (registers the model type)
        from multicls.build import load_problems, quiet_transformers

        self.folder, self.topics, self.num_facets = Path(folder), None, 0
        if not (self.folder / "config.json").exists() and not self.is_sentence_transformer:
            raise UserError(f"model {folder}: holds no config.json; pass an exported model.")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with load_problems(str(folder)), quiet_transformers():
            if self.is_sentence_transformer:
                from sentence_transformers import SentenceTransformer

                options: Any = {"device": str(self.device), "local_files_only": True}
                self.model: Any = SentenceTransformer(str(folder), **options)
                self.tokenizer = self.model.tokenizer
                self.parts: tuple[str, ...] = ("sentence",)
                most = self.model.max_seq_length or MOST_TOKENS
            else:
                self.model = AutoModel.from_pretrained(folder, dtype="float32").eval()
                self.model.to(self.device)
                self.tokenizer = model_tokenizer(folder, self.model.config.vocab_size)
                self.num_facets = getattr(self.model.config, "num_facets", 0)
                self.parts = ("mean", "cls", "facets") if self.num_facets else ("mean", "cls")
                self.topics = getattr(self.model, "topics", None)
                most = most_tokens(self.model.config, self.tokenizer)
        self.max_length = min(max_length or MOST_TOKENS, most)
        least = len(self.tokenizer("")["input_ids"]) + 1
        if self.max_length < least:
            raise UserError(f"--max_length {max_length}: {folder} reads {least} to {most} tokens.")
        if self.is_sentence_transformer:
            self.model.max_seq_length = self.max_length

    @cached_property
    def sha256(self) -> str:
        """Hash (16 hex digits) of all files that decide the embeddings."""
        return model_sha256(self.folder)

    @property
    def is_sentence_transformer(self) -> bool:
        """True if sentence-transformers made the model; a Multi-CLS model has parts of its own."""
        path = self.folder / "config.json"
        kind = read_json(path).get("model_type") if path.exists() else ""
        return (self.folder / "modules.json").exists() and kind != "multicls"

    def embed(
        self, texts: Sequence[str], progress: Callable[[int], object] = lambda number: None
    ) -> dict[str, Array]:
        """Returns the embeddings of texts by part, (N, F), without topics."""
        if not self.is_sentence_transformer:
            return embed(
                self.model,
                self.tokenizer,
                texts,
                max_length=self.max_length,
                num_facets=self.num_facets,
                device=self.device,
                progress=progress,
            )
        found = list[Array]()
        for start in range(0, len(texts), 8 * BATCH):
            rows = list(texts[start : start + 8 * BATCH])
            found.append(self.model.encode(rows, batch_size=BATCH, show_progress_bar=False))
            progress(len(rows))
        return {"sentence": np.concatenate(found).astype(np.float32)}


def most_tokens(config: Any, tokenizer: Any) -> int:
    """Returns the number of tokens of a text that an encoder reads."""
    from multicls.modeling_multicls import MultiClsConfig

    if not isinstance(config, MultiClsConfig):
        config = MultiClsConfig(encoder=config.to_dict(), num_facets=0)  # a copy: theirs stays
    return int(min(config.max_tokens, tokenizer.model_max_length))


def model_sha256(folder: Path) -> str:
    """Returns a hash (16 hex digits) of all files of a model that decide its embeddings."""
    patterns = (*WEIGHTS, *OTHERS)
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    digests = "\n".join(f"{path.relative_to(folder)}:{sha256_of(path)}" for path in files)
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def cached_embeddings(
    cache: Path,
    key: str,
    texts: Sequence[str],
    compute: Callable[[Sequence[str]], Mapping[str, Array]],
) -> dict[str, Array]:
    """Returns embeddings by part; those of texts that the cache lacks are computed and kept.

    Args:
        cache: Folder; a file in it holds one `key`, which names model and length.
        compute: Returns the embeddings of texts by part.
    """
    names = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in texts]
    path, kept = cache / f"{key}.npz", dict[str, Array]()
    if path.exists():
        with np.load(path, allow_pickle=False) as saved:
            kept = dict(saved)
    known = {str(name): row for row, name in enumerate(kept.pop("names", np.zeros(0, str)))}
    missing = {name: text for name, text in zip(names, texts, strict=True) if name not in known}
    if missing:
        for part, values in compute(list(missing.values())).items():
            kept[part] = np.concatenate([kept[part], values]) if part in kept else values
        known |= {name: len(known) + number for number, name in enumerate(missing)}
        cache.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            np.savez(file, names=np.array(list(known)), **kept)  # type: ignore[arg-type]
    rows = [known[name] for name in names]
    return {part: values[rows] for part, values in kept.items()}
