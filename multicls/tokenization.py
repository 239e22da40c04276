"""Facet tokens in a Hugging Face tokenizer, whose post-processor makes `[CLS] [C1]..[CK] a [SEP] b [SEP]`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from multicls.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def facet_tokens(vocabulary: dict[str, int], num_facets: int) -> list[str]:
    """Returns the facet tokens: the first K unused tokens of the vocabulary, or K new tokens if it has fewer.

    In bert-base-uncased they are `[unused0]`, `[unused1]`, ... (ids 1..K), so the vocabulary does not grow.
    """
    unused = [token for token in vocabulary if re.fullmatch(r"\[unused\d+\]", token)]
    if len(unused) >= num_facets:
        return sorted(unused, key=vocabulary.__getitem__)[:num_facets]
    return [f"[C{k}]" for k in range(1, num_facets + 1)]


def with_facets(tokenizer: PreTrainedTokenizerBase, num_facets: int) -> PreTrainedTokenizerFast:
    """Returns a copy of `tokenizer` that inserts the facets.

    As with any BERT tokenizer, a literal "[MASK]" in a text becomes the special token, which fill-mask needs. With
    `split_special_tokens=True` it is split like any other word, except by a unigram model whose own vocabulary finds
    special tokens in text, such as XLM-R's.

    Raises:
        UserError: the tokenizer is not a fast one, or has no token for [CLS], [SEP], [PAD] or [MASK].
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{tokenizer.name_or_path}: not a fast tokenizer: it has no tokenizer.json.")
    named = {name: getattr(tokenizer, name) for name in ("cls_token", "sep_token", "pad_token", "mask_token")}
    missing = [name for name, token in named.items() if token is None]
    if missing:
        raise UserError(
            f"{tokenizer.name_or_path or 'tokenizer'}: has no {', '.join(missing)}, which BERT needs (under any name); "
            "use another tokenizer, or train one with data_prep/run.py vocabulary."
        )
    backend = Tokenizer.from_str(backend.to_str())
    backend.no_padding()
    backend.no_truncation()
    facets = facet_tokens(backend.get_vocab(), num_facets)
    backend.add_special_tokens(facets)
    cls, sep = named["cls_token"], named["sep_token"]
    head = " ".join([cls, *facets])
    backend.post_processor = TemplateProcessing(
        single=f"{head} $A {sep}",
        pair=f"{head} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep, *facets)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        unk_token=tokenizer.unk_token,
        extra_special_tokens=facets,  # `get_special_tokens_mask` finds special tokens by these names
        **named,
    )


def facet_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the K ids that the tokenizer inserts between [CLS] and the text, in order."""
    return tuple(tokenizer("")["input_ids"][1:-1])
