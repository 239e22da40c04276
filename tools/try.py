"""Answers a sentence with its nearest passages of the corpus, by the original model and after a run, or with its label.

python tools/try.py runs/sample "The river rises in the mountains."
python tools/try.py comparison/model < sentences.txt

The passages are those of held-out documents. The label is that of a classifier that finetune/compare.py or
finetune/run.py has saved, with its probability; a tab divides the texts of a pair.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import count
from multicls.errors import UserError, run_command
from multicls.sample import SAMPLE, SAMPLE_CORPUS
from multicls.settings import Settings, parse

NEAREST = 3  # passages, or labels
SHOWN = 100  # characters of a passage
MOST = 1000  # passages to choose from
Answer = Callable[[str], list[str]]


class Options(Settings):
    """Options of the command."""

    model: CliPositionalArg[Path] = Field(
        description="finished run of pretrain/run.py, or a saved classifier"
    )
    sentence: CliPositionalArg[str | None] = Field(None, description="default: lines of stdin")


def nearest_passages(run: Path) -> Answer:
    """Returns the function that finds the nearest passages of a sentence before and after a run."""
    from finetune.heads.build import find_checkpoint
    from multicls.corpus import Corpus
    from multicls.embeddings import Embedder
    from multicls.passages import read_passages
    from pretrain.export import settings_of
    from pretrain.folder import RunFolder

    settings = settings_of(RunFolder(run))
    after = Embedder(run / "hf", settings.data.seq_length)
    models = {"after": after}
    if not settings.model.random_weights:
        original = Embedder(find_checkpoint(settings.model.checkpoint), settings.data.seq_length)
        models = {"before": original, "after": after}
    corpus = Corpus(SAMPLE_CORPUS if settings.data.corpus == SAMPLE else settings.data.corpus)
    fraction = settings.data.validation_fraction
    texts = read_passages(corpus, fraction, after.tokenizer, MOST).texts
    if not texts:
        raise UserError(f"{corpus.path}: no passage is held out.")

    def embed(model: Embedder, rows: Sequence[str]) -> np.ndarray:
        values = next(iter(model.embed(rows).values()))  # the mean, or the model's own
        return values / np.linalg.norm(values, axis=1, keepdims=True)

    tables = {name: embed(model, texts) for name, model in models.items()}

    def answer(sentence: str) -> list[str]:
        lines = []
        for name, table in tables.items():
            cosines = table @ embed(models[name], [sentence])[0]
            nearest = np.argsort(-cosines, kind="stable")[:NEAREST]
            lines += [f"{name}:", *(f"  {cosines[n]:.2f}  {texts[n][:SHOWN]}" for n in nearest)]
        return lines

    return answer


def labels(model: Path) -> Answer:
    """Returns the function that finds a sentence's label, or score, and its most probable labels."""
    from finetune.predict import label_texts
    from finetune.saved import SavedSystem

    system = SavedSystem(model)

    def answer(sentence: str) -> list[str]:
        texts, wanted = tuple(sentence.split("\t")), count(len(system.fields), "text")
        if len(texts) != len(system.fields):
            raise UserError(f"{sentence!r}: the model reads {wanted}; a tab divides two.")
        found = label_texts(system, [texts]).iloc[0].to_dict()
        lines = [f"  {found.pop(name)}" for name in list(found) if name.startswith("predicted_")]
        ranked = sorted(found, key=lambda name: found[name], reverse=True)[:NEAREST]
        return lines + [f"    {found[name]:.2f}  {name.removeprefix('p_')}" for name in ranked]

    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Answers the sentence, or each line of stdin."""
    options = parse(Options, argv, prog="tools/try.py", doc=__doc__)
    model = options.model.parent if options.model.name == "hf" else options.model
    if (model / "settings.yaml").exists() and (model / "hf/config.json").exists():
        answer = nearest_passages(model)
    elif (model / "config.json").exists() or (model / "system.json").exists():
        answer = labels(model)
    else:
        raise UserError(f"{model}: no finished run of pretrain/run.py, and no saved classifier.")
    sentences = [options.sentence] if options.sentence else map(str.strip, sys.stdin)
    for sentence in filter(None, sentences):
        print("\n".join([sentence, *answer(sentence)]), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
