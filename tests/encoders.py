"""Tiny random encoders of many families, each with the tokenizer class of its family and a vocabulary of syllables.

`save_encoder("mpnet", folder)` writes a folder as a user would start from: `AutoModelForMaskedLM` and tokenizer.
"""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrs"]  # 240 syllables
TEXTS = ["bal del fil", "gol", "nar pel ros tun sil kor"]
ROLES = ("cls", "pad", "sep", "unk", "mask")
BRACKETS = {f"{role}_token": f"[{role.upper()}]" for role in ROLES}
ANGLES = dict(zip(BRACKETS, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), strict=True))
UNUSED = [f"[unused{n}]" for n in range(10)]


def wordpiece(
    kind: Any = hf.BertTokenizer,
    special: tuple[str, ...] = ("[PAD]", *UNUSED, "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    **options: Any,
) -> Any:
    """Returns a tokenizer of word pieces."""
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = [*special, *letters, *string.punctuation, *(f"##{x}" for x in letters), *WORDS]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return kind(vocab=vocabulary, model_max_length=64, **options)


def unigram(kind: Any, names: dict[str, str]) -> Any:
    """Returns a tokenizer of a unigram model, as sentencepiece makes it."""
    pieces = [*names.values()][:4] + ["▁", *string.printable.strip()]
    pieces += [f"▁{word}" for word in WORDS] + [word[1:] for word in WORDS[:12]]
    pieces.append(names["mask_token"])
    scores = [(piece, -float(len(pieces)) if len(piece) == 1 else -2.0) for piece in pieces]
    return kind(vocab=scores, model_max_length=62, **names)


def byte_level(names: dict[str, str], unused: list[str], separators: int) -> Any:
    """Returns a byte-level BPE as RoBERTa's (`ANGLES`) or ModernBERT's (`BRACKETS`, with unused tokens)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*names.values(), *unused],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    cls, sep = names["cls_token"], names["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {' '.join([sep] * separators)} $B {sep}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
    mask: Any = {"mask_token": AddedToken(names["mask_token"], lstrip=True)}
    options: Any = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 62}
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **options, **(names | mask))


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
ONE_TYPE = SIZES | {"type_vocab_size": 1}
LOCAL = SIZES | {"local_attention": 16, "max_position_embeddings": 512}
DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64}
DISENTANGLED = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
DEBERTA = SIZES | DISENTANGLED | {"position_biased_input": False, "share_att_key": True}
MPNET = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
FAMILIES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "bert": (SIZES, wordpiece),
    "roberta": (ONE_TYPE, partial(byte_level, ANGLES, [], 2)),
    "xlm-roberta": (ONE_TYPE, partial(unigram, hf.XLMRobertaTokenizer, ANGLES)),
    "camembert": (ONE_TYPE, partial(unigram, hf.CamembertTokenizer, ANGLES)),
    "modernbert": (LOCAL, partial(byte_level, BRACKETS, UNUSED, 1)),
    "deberta-v2": (DEBERTA, partial(unigram, hf.DebertaV2Tokenizer, BRACKETS)),
    "mpnet": (SIZES, partial(wordpiece, hf.MPNetTokenizer, MPNET)),
    "distilbert": (
        DISTILBERT | {"max_position_embeddings": 64},
        partial(wordpiece, model_input_names=["input_ids", "attention_mask"]),
    ),
    "electra": (SIZES | {"embedding_size": 16}, wordpiece),
    "convbert": (SIZES | {"embedding_size": 32}, wordpiece),
    "nomic_bert": (SIZES, wordpiece),
    "eurobert": (SIZES | {"num_key_value_heads": 2}, partial(byte_level, BRACKETS, [], 1)),
}


def encoder_config(kind: str, tokenizer: Any = None, **changes: Any) -> hf.PreTrainedConfig:
    """Returns the configuration of a family's tiny encoder; `changes` are fields of it."""
    fields, tokenizer_of = FAMILIES[kind]
    tokenizer = tokenizer or tokenizer_of()
    ids = {"pad_token_id": tokenizer.pad_token_id}
    if kind == "modernbert":
        cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        ids |= {"cls_token_id": cls, "bos_token_id": cls, "sep_token_id": sep, "eos_token_id": sep}
    elif tokenizer.bos_token_id is not None:
        ids |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return hf.AutoConfig.for_model(kind, **{"vocab_size": len(tokenizer)} | fields | ids | changes)


def save_encoder(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a family's tiny masked-LM model of random weights, none of them at 0 or 1, with its tokenizer."""
    tokenizer = FAMILIES[kind][1]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = hf.AutoModelForMaskedLM.from_config(encoder_config(kind, tokenizer, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
