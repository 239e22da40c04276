"""Trains what one would pick instead: the same model continued on the same text for the same time, by other methods.

python benchmarks/peers.py --domain medquad=DATA/medquad --seconds 600 --seeds 1 2 3 --output runs/peers
python benchmarks/domains.py --domain medquad=DATA/medquad --max_length 64 \\
    --model "simcse=runs/peers/{domain}/simcse-*/hf" --output benchmarks/results/simcse.json

A domain is a folder with docs.jsonl.gz ({"text"}). Settings are those of each method's own example: `mlm` is
transformers' run_mlm.py; `tsdae`, `simcse` and `adjacent` (passage and next passage, in-batch negatives, mean pooling)
are losses of sentence-transformers in its trainer. Two short trials choose the number of steps that fills the time: CPU
seconds of the process, or seconds on a GPU. Trained models are kept: the same command resumes.
"""

import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, PositiveInt

from benchmarks.domains import Named
from benchmarks.harness import read_lines
from multicls.errors import UserError, run_command
from multicls.files import read_json, sha256_of, write_json
from multicls.sample import SAMPLE, sample_model
from multicls.settings import Settings, parse

Peer = Literal["mlm", "tsdae", "simcse", "adjacent"]
# Arguments of a peer's trainer. The learning rate falls to 0 linearly, after a warm-up of a share of the steps.
ARGUMENTS: dict[str, dict[str, Any]] = {
    # Trainer's defaults, which run_mlm.py keeps.
    "mlm": {"learning_rate": 5e-5, "per_device_train_batch_size": 8},
    # sentence-transformers' train_tsdae_from_file.py and train_simcse_from_file.py.
    "tsdae": {"learning_rate": 3e-5, "per_device_train_batch_size": 8, "warmup_steps": 0.1},
    "simcse": {"learning_rate": 5e-5, "per_device_train_batch_size": 128, "warmup_steps": 0.1},
    # training_nli_v2.py, the example of its loss, has 128 pairs a step: in the same time half as many steps.
    "adjacent": {"learning_rate": 5e-5, "per_device_train_batch_size": 64, "warmup_steps": 0.1},
}
LENGTHS = {"mlm": 128, "tsdae": 75, "simcse": 32, "adjacent": 75}  # tokens of an input
DELETED = (
    0.6  # share of a text's words that TSDAE deletes, as in its paper; its example deletes 0.4
)
TRIALS = (2, 10)  # steps
RECORD = "record.json"


class Options(Settings):
    """Options of the training."""

    domain: list[Named] = Field(min_length=1, description="NAME=FOLDER of documents")
    output: Path = Field(Path("runs/peers"), description="folder of the trained models")
    model: str = Field(SAMPLE, description="folder or Hub id of the encoder that all continue")
    peers: list[Peer] = Field(list(get_args(Peer)), description="methods")
    seeds: list[int] = Field([1], min_length=1, description="seeds of the training")
    seconds: float = Field(600, gt=0, description="time of a training run")
    steps: PositiveInt | None = Field(None, description="steps of a run instead, for a first try")


@lru_cache(maxsize=2)
def passages(documents: Path, model: str, length: int) -> list[list[str]]:
    """Cuts each document into passages of as many whole sentences as `length` tokens hold, at least one."""
    from transformers import AutoTokenizer

    from data_prep.sentences import split_paragraph

    tokenizer, found = AutoTokenizer.from_pretrained(model), list[list[str]]()
    for text in read_lines(documents)["text"]:
        filled, cut = length, list[str]()
        lines = (split_paragraph(line, "en") for line in text.split("\n"))
        for sentence in chain.from_iterable(lines):
            tokens = len(tokenizer(sentence, add_special_tokens=False, verbose=False)["input_ids"])
            if filled + tokens <= length - 2:  # [CLS] and [SEP]
                cut[-1] += f" {sentence.strip()}"
            elif tokens:
                cut.append(sentence.strip())
                filled = 0
            filled += tokens
        found.append(cut)
    return found


@lru_cache(maxsize=2)
def blocks(documents: Path, model: str, length: int) -> list[dict[str, list[int]]]:
    """Joins the tokens of all documents and cuts them into inputs of `length` tokens, as run_mlm.py does."""
    from transformers import AutoTokenizer

    texts = read_lines(documents)["text"].tolist()
    tokens = AutoTokenizer.from_pretrained(model)(texts, verbose=False)["input_ids"]
    joined = list(chain.from_iterable(tokens))
    starts = range(0, len(joined) - length + 1, length)
    return [{"input_ids": joined[start : start + length]} for start in starts]


def train(peer: str, model: str, documents: Path, steps: int, seed: int, folder: Path) -> float:
    """Trains a peer and writes `folder`/hf; returns the seconds, without those that cut the text."""
    import sentence_transformers  # noqa: F401 (its import is no training time)
    import torch
    from transformers import AutoTokenizer, set_seed

    from multicls.build import quiet_transformers

    on_gpu, length = torch.cuda.is_available(), LENGTHS[peer]
    clock = time.perf_counter if on_gpu else time.process_time
    texts: Any = (blocks if peer == "mlm" else passages)(documents, model, length)
    start = clock()
    options: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "seed": seed,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    } | ARGUMENTS[peer]
    set_seed(seed)
    with quiet_transformers():
        if peer == "mlm":
            trained = train_mlm(model, texts, options)
        else:
            trained = train_sentence_encoder(peer, model, texts, length, options)
        trained.save_pretrained(folder / "hf")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "hf")
    return clock() - start


def train_mlm(path: str, inputs: Any, options: Mapping[str, Any]) -> Any:
    """Returns the model after masked LM with transformers' Trainer and collator; a missing head starts at random."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    model = AutoModelForMaskedLM.from_pretrained(path)
    collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(path))
    arguments = TrainingArguments(**options)
    Trainer(model=model, args=arguments, train_dataset=inputs, data_collator=collator).train()
    return model


def train_sentence_encoder(
    peer: str, path: str, cut: Sequence[Sequence[str]], length: int, options: Mapping[str, Any]
) -> Any:
    """Returns the encoder after TSDAE (embedding: [CLS]), SimCSE or adjacent passages (mean)."""
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses, modules

    encoder = modules.Transformer(path, max_seq_length=length)
    size, mode = encoder.get_embedding_dimension(), "cls" if peer == "tsdae" else "mean"
    device = "cpu" if options["use_cpu"] else "cuda"
    model = st.SentenceTransformer(modules=[encoder, modules.Pooling(size, mode)], device=device)
    loss: Any = losses.MultipleNegativesRankingLoss(model)
    if peer == "tsdae":
        loss = losses.DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True)
    arguments = st.SentenceTransformerTrainingArguments(**options)
    data = pairs_of(peer, cut, options["seed"])
    st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=loss
    ).train()
    return model.transformers_model


def pairs_of(peer: str, cut: Sequence[Sequence[str]], seed: int) -> Any:
    """Returns the pairs of texts that a peer learns from, as a data set."""
    from datasets import Dataset

    texts = list(chain.from_iterable(cut))
    if peer == "tsdae":
        generator = random.Random(seed)
        data = Dataset.from_dict({"text": texts})
        data.set_transform(  # noise anew in each pass
            lambda batch: {"noisy": [without_words(t, generator) for t in batch["text"]], **batch}
        )
        return data
    pairs = list(zip(texts, texts, strict=True))  # SimCSE: only dropout differs
    if peer == "adjacent":
        pairs = list(chain.from_iterable(map(pairwise, cut)))
    first, second = map(list, zip(*pairs, strict=True))
    return Dataset.from_dict({"anchor": first, "positive": second})


def without_words(text: str, generator: random.Random) -> str:
    """Returns the text without most of its words, at least one kept: the noise of TSDAE."""
    words = text.split()
    return " ".join([word for word in words if generator.random() > DELETED] or words[:1])


def steps_that_fit(peer: str, model: str, documents: Path, options: Options, folder: Path) -> int:
    """Returns the number of steps that take the time, from the difference of two trials in a folder."""
    if options.steps:
        return options.steps
    path, trial = folder / f"{peer}-speed.json", folder / f"{peer}-trial"
    if not path.exists():
        used = [train(peer, model, documents, steps, 0, trial) for steps in TRIALS]
        shutil.rmtree(trial)
        if used[1] <= used[0]:
            raise UserError(f"{peer}: {TRIALS} steps took {used} seconds: set --steps.")
        step = (used[1] - used[0]) / (TRIALS[1] - TRIALS[0])
        write_json(path, {"start": max(0.0, used[0] - TRIALS[0] * step), "step": step})
    speed = read_json(path)
    return max(1, int((options.seconds - speed["start"]) / speed["step"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not there yet."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    options = parse(Options, argv, prog="benchmarks/peers.py", doc=__doc__)
    model = str(sample_model()) if options.model == SAMPLE else options.model
    for seed in options.seeds:
        for word in options.domain:
            domain, _, source = word.partition("=")
            documents = Path(source) / "docs.jsonl.gz"
            if not documents.exists():
                raise UserError(f"--domain {word}: {source} holds no docs.jsonl.gz.")
            wanted = options.model_dump(mode="json", include={"model", "seconds", "steps"})
            wanted |= {"documents": sha256_of(documents)}
            for peer in options.peers:
                folder = options.output / domain / f"{peer}-{seed}"
                record = read_json(folder / RECORD) if (folder / RECORD).exists() else None
                if record and record["settings"] != wanted:
                    raise UserError(f"{folder}: was made otherwise; pass another --output.")
                if record:
                    continue
                print(f"{domain}: {peer}, seed {seed}", flush=True)
                steps = steps_that_fit(peer, model, documents, options, folder.parent)
                used = train(peer, model, documents, steps, seed, folder)
                write_json(folder / RECORD, {"settings": wanted, "steps": steps, "seconds": used})
    return 0


if __name__ == "__main__":
    run_command(main)
