"""Configuration of Multi-CLS models (arXiv:2210.05043). Saved models carry this file: it imports only transformers."""

from typing import Any, ClassVar

from transformers import AutoConfig, BertConfig, PreTrainedConfig, __version__

if int(__version__.split(".")[0]) < 5:
    raise ImportError(f"this model needs transformers 5, this is transformers {__version__}")

OFFSET_POSITIONS = (  # encoders whose first position is that of the padding token plus 1
    *("roberta", "xlm-roberta", "camembert", "mpnet", "roberta-prelayernorm", "xlm-roberta-xl"),
    *("xmod", "data2vec-text", "ibert", "longformer"),
)
AUTO_MAP = {
    "AutoConfig": "configuration_multicls.MultiClsConfig",
    "AutoModel": "modeling_multicls.MultiClsModel",
    "AutoModelForPreTraining": "modeling_multicls.MultiClsForPreTraining",
    "AutoModelForMaskedLM": "modeling_multicls.MultiClsForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_multicls.MultiClsForSequenceClassification",
}


class MultiClsConfig(PreTrainedConfig):
    """Configuration of an encoder with K facets, extra CLS tokens after [CLS]. A field out of range is a ValueError.

    Args:
        encoder: configuration of the encoder, or its fields with their `model_type`. None: BERT-base.
        num_facets: K; the facets stand at positions 1..K. 0: [CLS] serves as the only facet.
        facet_layers: ascending numbers, from 1, of the layers with inserted linear layers (section 2.5). None: one
            third and two thirds of the depth, moved before a global layer if the encoder has local ones; []: none.
        mcqt_lambda: weight of the best facet pair, against the sum of facets, in the MCQT score (Eq. 2).
        mcqt_scale: factor of the MCQT scores before the softmax, an inverse temperature; the paper has none.
        num_topics: T, topics of a text beside its embeddings (`TopicTable`); 0: none.
        pooling: the encoder's own embedding of a text: "mean", over the tokens without the facets, or "cls".
        normalize: its length is 1.
        embedding: parts of `embed_sentences`, such as "mean+facets+topics"; "": the encoder's own embedding.
        encoder_tokens: tokens of a text that the encoder reads in `embed_sentences`; topics read all. None: all.
        hard_negatives: three parts an example, the third a hard negative of the first (section 2.4); False: two.
    """

    model_type = "multicls"
    sub_configs: ClassVar[dict[str, Any]] = {"encoder": AutoConfig}

    encoder: Any = None
    num_facets: int = 5
    facet_layers: list[int] | None = None
    mcqt_lambda: float = 0.1
    mcqt_scale: float = 1.0
    num_topics: int = 0
    pooling: str = "mean"
    normalize: bool = False
    embedding: str = ""
    encoder_tokens: int | None = None
    hard_negatives: bool = True
    classifier_dropout: float = 0.1
    layer_norm_eps: float = 1e-12

    # Fields of the encoder that tools read from the configuration of the whole model.
    hidden_size = property(lambda self: self.encoder.hidden_size)
    num_hidden_layers = property(lambda self: self.encoder.num_hidden_layers)
    vocab_size = property(lambda self: self.encoder.vocab_size)
    pad_token_id = property(lambda self: getattr(self.encoder, "pad_token_id", None))
    has_token_types = property(lambda self: getattr(self.encoder, "type_vocab_size", 0) > 1)
    tie_word_embeddings = property(lambda self: getattr(self.encoder, "tie_word_embeddings", True))
    # Sizes: facet positions 1..K; S, embeddings of a sequence, is 1 ([CLS] itself) if K is 0; P, parts of an example.
    facet_slice = property(lambda self: slice(1, 1 + self.num_facets))
    num_embeddings_per_sequence = property(lambda self: max(self.num_facets, 1))
    num_parts = property(lambda self: 3 if self.hard_negatives else 2)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder is None:
            self.encoder = BertConfig()
        elif isinstance(self.encoder, dict):
            self.encoder = AutoConfig.for_model(**self.encoder)
        if self.facet_layers is None:
            self.facet_layers = self._default_layers() if self.num_facets else []
        self.check_embedding()
        layers, depth = self.facet_layers, self.num_hidden_layers
        if not 0 <= self.num_facets < self.max_tokens - 2:
            raise ValueError(f"num_facets = {self.num_facets}: not in 0..{self.max_tokens - 3}")
        if layers != sorted(set(layers) & set(range(1, depth + 1))):
            raise ValueError(f"facet_layers = {layers}: no ascending layer numbers in 1..{depth}")
        if layers and not self.num_facets:
            raise ValueError(f"facet_layers = {layers}: there are no facets (num_facets = 0)")
        super().__post_init__(**kwargs)

    def _default_layers(self) -> list[int]:
        """Returns one third and two thirds of the depth, or the nearest layers whose next one attends globally."""
        depth, types = self.num_hidden_layers, getattr(self.encoder, "layer_types", None) or []
        thirds = (depth / 3, 2 * depth / 3)
        if before_global := [n for n in range(1, len(types)) if types[n] == "full_attention"]:
            return sorted({min(before_global, key=lambda n: abs(n - third)) for third in thirds})
        return sorted({round(third) for third in thirds} - {0})

    @property
    def part_sizes(self) -> dict[str, int]:
        """Size of each part that an embedding may have."""
        D, facets = self.hidden_size, self.num_facets * self.hidden_size
        sizes = {"mean": D, "cls": D, "facets": facets, "topics": self.num_topics}
        return {part: size for part, size in sizes.items() if size}

    @property
    def projection_dim(self) -> int:
        """Size of the result of `embed_sentences`, by the name that sentence-transformers asks for."""
        parts = self.embedding.split("+") if self.embedding else [self.pooling]
        return sum(self.part_sizes[part] for part in parts)

    def check_embedding(self) -> None:
        """Raises ValueError for an unknown pooling or part; models call it, too: options of loading come later."""
        if self.pooling not in ("mean", "cls"):
            raise ValueError(f"pooling = '{self.pooling}': not 'mean' or 'cls'")
        asked, known = self.embedding.split("+") if self.embedding else [], self.part_sizes
        if set(asked) - set(known) or len(set(asked)) < len(asked):
            raise ValueError(
                f"embedding = '{self.embedding}': not some of {', '.join(known)}, joined by +"
            )

    @property
    def max_tokens(self) -> int:
        """Number of tokens that the encoder has positions for, special tokens and facets included."""
        return getattr(self.encoder, "max_position_embeddings", 512) - self.position_offset

    @property
    def position_offset(self) -> int:
        """Position id of the first token: 0, or the padding token's id + 1 in RoBERTa's family."""
        return self.pad_token_id + 1 if self.encoder.model_type in OFFSET_POSITIONS else 0

    def get_text_config(self, *_: Any, **__: Any) -> PreTrainedConfig:
        """Returns the encoder's configuration, in which `resize_token_embeddings` writes the vocabulary's size."""
        return self.encoder

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the `auto_map` with which `trust_remote_code=True` finds the classes."""
        return super().to_dict() | {"auto_map": dict(AUTO_MAP)}
