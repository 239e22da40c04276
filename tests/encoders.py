"""Tiny random encoders of many families, each with a tokenizer in the manner of its family.

`save_encoder("mpnet", folder)` writes a folder as a user would start from: `AutoModelForMaskedLM` and tokenizer.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedTokenizerFast

WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrs"]  # 240 syllables
TEXTS = ["bal del fil", "gol", "nar pel ros tun sil kor"]
BRACKETS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
ANGLES = {
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def _template(backend: Tokenizer, cls: str, sep: str, second: str, separators: int = 1) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {' '.join([sep] * separators)} $B{second} {sep}{second}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )


def wordpiece(types: bool = True) -> PreTrainedTokenizerFast:
    """Returns a tokenizer as BERT's, with unused tokens."""
    special = ["[PAD]", *(f"[unused{n}]" for n in range(10)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = [*special, *letters, *string.punctuation, *(f"##{x}" for x in letters), *WORDS]
    return wordpiece_of(tokens, BRACKETS, ":1" if types else "", 1)


def wordpiece_with_angles() -> PreTrainedTokenizerFast:
    """Returns a tokenizer as MPNet's: word pieces, `<s> a </s></s> b </s>`, nothing unused."""
    letters = [*string.ascii_lowercase, *string.digits]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    inside = [*letters, *string.punctuation, *(f"##{x}" for x in letters)]
    return wordpiece_of([*special, *inside, *WORDS, "<mask>"], ANGLES, "", 2)


def wordpiece_of(
    tokens: list[str], names: dict[str, str], second: str, separators: int
) -> PreTrainedTokenizerFast:
    """Returns a WordPiece tokenizer of these tokens."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(sorted(set(names.values()), key=vocabulary.__getitem__))
    _template(backend, names["cls_token"], names["sep_token"], second, separators)
    inputs = ["input_ids", *(["token_type_ids"] if second else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=64, model_input_names=inputs, **names
    )


def byte_level(names: dict[str, str], unused: int, separators: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE as RoBERTa's (`ANGLES`) or ModernBERT's (`BRACKETS`, with unused tokens)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    roles = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    special = [names[role] for role in roles] + [f"[unused{n}]" for n in range(unused)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    _template(backend, names["cls_token"], names["sep_token"], "", separators)
    mask = AddedToken(names["mask_token"], lstrip=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=62,
        model_input_names=["input_ids", "attention_mask"],
        **(names | {"mask_token": mask}),
    )


def unigram(names: dict[str, str], separators: int) -> PreTrainedTokenizerFast:
    """Returns a unigram model as XLM-R's and CamemBERT's (`ANGLES`) or DeBERTa-v3's (`BRACKETS`)."""
    roles = ("cls_token", "pad_token", "sep_token", "unk_token")
    pieces = [names[role] for role in roles] + ["▁", *string.printable.strip()]
    pieces += [f"▁{word}" for word in WORDS] + [word[1:] for word in WORDS[:12]]
    pieces.append(names["mask_token"])
    scores = [(piece, -float(len(pieces)) if len(piece) == 1 else -2.0) for piece in pieces]
    backend = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(sorted(set(names.values()), key=pieces.index))
    second = ":1" if separators == 1 else ""
    _template(backend, names["cls_token"], names["sep_token"], second, separators)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=62, **names)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64}
DISENTANGLED = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
FAMILIES: dict[str, tuple[dict[str, Any], Callable[[], PreTrainedTokenizerFast]]] = {
    "bert": (SIZES, wordpiece),
    "roberta": (SIZES | {"type_vocab_size": 1}, lambda: byte_level(ANGLES, 0, 2)),
    "xlm-roberta": (SIZES | {"type_vocab_size": 1}, lambda: unigram(ANGLES, 2)),
    "camembert": (SIZES | {"type_vocab_size": 1}, lambda: unigram(ANGLES, 2)),
    "modernbert": (
        SIZES | {"local_attention": 16, "max_position_embeddings": 512},
        lambda: byte_level(BRACKETS, 10, 1),
    ),
    "deberta-v2": (
        SIZES | DISENTANGLED | {"position_biased_input": False, "share_att_key": True},
        lambda: unigram(BRACKETS, 1),
    ),
    "mpnet": (SIZES, wordpiece_with_angles),
    "distilbert": (DISTILBERT | {"max_position_embeddings": 64}, lambda: wordpiece(types=False)),
    "electra": (SIZES | {"embedding_size": 16}, wordpiece),
    "convbert": (SIZES | {"embedding_size": 32}, wordpiece),
    "nomic_bert": (SIZES, wordpiece),
}


def encoder_config(kind: str, tokenizer: Any = None, **changes: Any) -> PreTrainedConfig:
    """Returns the configuration of a family's tiny encoder; `changes` are fields of it."""
    fields, tokenizer_of = FAMILIES[kind]
    tokenizer = tokenizer or tokenizer_of()
    ids = {"pad_token_id": tokenizer.pad_token_id}
    if kind == "modernbert":
        cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        ids |= {"cls_token_id": cls, "bos_token_id": cls, "sep_token_id": sep, "eos_token_id": sep}
    elif tokenizer.bos_token_id is not None:
        ids |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields = {"vocab_size": len(tokenizer)} | fields | ids | changes
    return AutoConfig.for_model(kind, **fields)


def save_encoder(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a family's tiny masked-LM model of random weights, none of them at 0 or 1, with its tokenizer."""
    tokenizer = FAMILIES[kind][1]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForMaskedLM.from_config(encoder_config(kind, tokenizer, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
