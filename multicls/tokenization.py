"""Facet tokens in a Hugging Face tokenizer, whose post-processor makes `[CLS] [C1]..[CK] a [SEP] b [SEP]`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multicls.errors import UserError, first_line

# Role of a special token -> the role that replaces it if a tokenizer has no such token.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FACET = re.compile(r"[\[<]unused_?\d+[\]>]|\[C\d+\]")
PADDING = 1024  # most entries of a vocabulary that its tokenizer may lack, and a tenth of it
PAD_TO = 64  # but always as many as an export may add: any vocabulary is a multiple of it
ROLES = {"cls_token": "bos_token", "sep_token": "eos_token", "pad_token": "", "mask_token": ""}


def load_tokenizer(checkpoint: str, revision: str | None = None) -> Any:
    """Loads the fast tokenizer of a checkpoint, or raises UserError; transformers converts sentencepiece models."""
    from transformers import AutoTokenizer

    problem = ""
    try:
        options: Any = {"revision": revision} if revision else {}
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, **options)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            problem = "is slow, and transformers cannot convert it to a fast one"
        elif len(tokenizer) <= len(tokenizer.all_special_tokens):  # made without files
            problem = "has no vocabulary; are its files there?"
    except Exception as error:  # converters raise many types
        problem = f"cannot be loaded: {first_line(error)}"
    if problem:
        raise UserError(f"model {checkpoint}: its tokenizer {problem}")
    return tokenizer


def model_tokenizer(folder: str | Path, vocab_size: int) -> Any:
    """Returns a folder's tokenizer, to which "[SEP]" is text like any; a ValueError if it is missing or another's."""
    from transformers import AutoTokenizer

    options: Any = {"split_special_tokens": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        keep_words(tokenizer)
    lacks = vocab_size - len(tokenizer)
    if not 0 <= lacks <= max(PAD_TO, min(0.1 * vocab_size, PADDING)):
        raise ValueError(
            f"its tokenizer has {len(tokenizer):,} entries, its vocabulary {vocab_size:,}. Save the model's own "
            f"tokenizer there: AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})"
        )
    return tokenizer


def with_roles_only(tokenizer_json: str, names: Mapping[str, Any]) -> str:
    """Returns a tokenizer.json in which only roles and facets are special; a token that a user added is a word.

    A literal "[SEP]" in a text is text, since text must not place special tokens. A word as "[DRUG]" that a user made
    a special token has to stay one token, in the corpus as in fine-tuning.

    Args:
        names: The tokens of the roles: `tokenizer_config.json`, or a tokenizer's `special_tokens_map`. Without any, the
            JSON is returned as it is.
    """
    values = [names.get(role) for role in NAMED]
    roles = {
        value["content"] if isinstance(value, dict) else str(value) for value in values if value
    }
    parts = json.loads(tokenizer_json)
    words = [
        token
        for token in parts.get("added_tokens") or []
        if token["special"]
        and token["content"] not in roles
        and not FACET.fullmatch(token["content"])
    ]
    if not roles or not words:
        return tokenizer_json
    for token in words:
        token["special"] = False
    return json.dumps(parts, ensure_ascii=False)


def keep_words(tokenizer: Any) -> None:
    """Makes the special tokens of a fast tokenizer that a user added words, as `with_roles_only` does."""
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    content = with_roles_only(backend.to_str(), tokenizer.special_tokens_map)
    fresh = Tokenizer.from_str(content)
    fresh.encode_special_tokens = backend.encode_special_tokens
    tokenizer._tokenizer = fresh  # special tokens of a backend cannot become words


def facet_tokens(vocabulary: dict[str, int], num_facets: int) -> list[str]:
    """Returns the facet tokens: the first K unused tokens of the vocabulary, or K new tokens if it has fewer.

    In bert-base-uncased they are `[unused0]`, `[unused1]`, ... (ids 1..K), so the vocabulary does not grow.
    """
    unused = [token for token in vocabulary if FACET.fullmatch(token) and "unused" in token]
    if len(unused) >= num_facets:
        return sorted(unused, key=vocabulary.__getitem__)[:num_facets]
    return [f"[C{k}]" for k in range(1, num_facets + 1)]


def with_facets(tokenizer: Any, num_facets: int, token_types: bool = True) -> Any:
    """Returns a fast copy of `tokenizer` that inserts the facets, and numbers token types if the encoder takes them.

    A pair of texts keeps the separators of the tokenizer: one, or `</s></s>` as in RoBERTa. A literal "[MASK]" in a
    text becomes the special token, unless `split_special_tokens=True`, which unigram models such as XLM-R's ignore.

    Raises:
        UserError: the tokenizer has no token for [CLS], [SEP], [PAD] or [MASK] under any name.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    named = {
        role: getattr(tokenizer, role) or (stand_in and getattr(tokenizer, stand_in))
        for role, stand_in in ROLES.items()
    }
    if missing := [role for role, token in named.items() if not token]:
        name = tokenizer.name_or_path or "tokenizer"
        raise UserError(f"{name}: has no {', '.join(missing)}, which pretraining needs.")
    cls, sep = named["cls_token"], named["sep_token"]
    pair_ids: list[int] = tokenizer("a", "a")["input_ids"]
    between = sep if pair_ids.count(tokenizer.convert_tokens_to_ids(sep)) < 3 else f"{sep} {sep}"
    content = with_roles_only(tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map)
    backend = Tokenizer.from_str(content)
    backend.no_padding()
    backend.no_truncation()
    facets = facet_tokens(backend.get_vocab(), num_facets)
    backend.add_special_tokens(facets)
    head, second = " ".join([cls, *facets]), ":1" if token_types else ""
    backend.post_processor = TemplateProcessing(
        single=f"{head} $A {sep}",
        pair=f"{head} $A {between} $B{second} {sep}{second}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep, *facets)],
    )
    types = ["token_type_ids"] if token_types else []
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", *types, "attention_mask"],
        unk_token=tokenizer.unk_token,
        extra_special_tokens=facets,  # `get_special_tokens_mask` finds special tokens by these names
        **named,
    )


def facet_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the K ids that the tokenizer inserts between [CLS] and the text, in order."""
    return tuple(tokenizer("")["input_ids"][1:-1])
