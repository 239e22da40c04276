"""The arms of benchmarks/peers.py: each continues a model on the same documents and writes a Hugging Face folder.

`mlm` does what transformers' example run_mlm.py does. `tsdae` and `simcse` are sentence-transformers' losses in its own
trainer, as in its examples of unsupervised learning. `own_text` and `own_text_mlm` are this project's commands.
"""

import random
import resource
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoModelForMaskedLM, AutoTokenizer, set_seed

from benchmarks.harness import read_lines, run
from data_prep.sentences import split_paragraph
from multicls.build import quiet_transformers

# Arguments of a peer's trainer. The learning rate falls to 0 linearly, after a warm-up of a share of the steps.
PEERS: dict[str, dict[str, Any]] = {
    # Trainer's defaults, which run_mlm.py keeps.
    "mlm": {"learning_rate": 5e-5, "per_device_train_batch_size": 8},
    # sentence-transformers' train_tsdae_from_file.py and train_simcse_from_file.py.
    "tsdae": {"learning_rate": 3e-5, "per_device_train_batch_size": 8, "warmup_steps": 0.1},
    "simcse": {"learning_rate": 5e-5, "per_device_train_batch_size": 128, "warmup_steps": 0.1},
}
LENGTHS = {"mlm": 128, "tsdae": 75, "simcse": 32}  # tokens of an input
OWN = {"own_text": ["own_text"], "own_text_mlm": ["own_text", "mlm_only"]}  # arm -> recipes
OWN_FLAGS = ["--run.eval_every=1000000", "--run.save_every=1000000", "--run.eval_examples=10"]
OWN_FLAGS += ["--run.keep_best=null"]  # recall would choose between the first and the last step
DELETED = 0.6  # share of a text's words that TSDAE deletes


def cpu_clock() -> float:
    """Returns the CPU seconds of this process and of its finished children."""
    usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usage)


@lru_cache(maxsize=2)
def passages(documents: Path, model: str, length: int) -> list[str]:
    """Cuts documents into passages of as many whole sentences as `length` tokens hold, at least one."""
    tokenizer, found = AutoTokenizer.from_pretrained(model), list[str]()
    for text in read_lines(documents)["text"]:
        filled = length
        lines = (split_paragraph(line, "en") for line in text.split("\n"))
        for sentence in chain.from_iterable(lines):
            tokens = len(tokenizer(sentence, add_special_tokens=False, verbose=False)["input_ids"])
            if filled + tokens <= length - 2:  # [CLS] and [SEP]
                found[-1] += f" {sentence.strip()}"
            elif tokens:
                found.append(sentence.strip())
                filled = 0
            filled += tokens
    return found


@lru_cache(maxsize=2)
def blocks(documents: Path, model: str, length: int) -> list[dict[str, list[int]]]:
    """Joins the tokens of all documents and cuts them into inputs of `length` tokens, as run_mlm.py does."""
    texts = read_lines(documents)["text"].tolist()
    tokens = AutoTokenizer.from_pretrained(model)(texts, verbose=False)["input_ids"]
    joined = list(chain.from_iterable(tokens))
    starts = range(0, len(joined) - length + 1, length)
    return [{"input_ids": joined[start : start + length]} for start in starts]


def train_own(arm: str, model: str, corpus: Path, steps: int, seed: int, folder: Path) -> float:
    """Trains one of our arms with pretrain/run.py, whose run folder is `folder`; returns the CPU seconds."""
    start = cpu_clock()
    shutil.rmtree(folder, ignore_errors=True)  # of a stopped run, whose CPU time is not known
    values = {"model": model, "corpus": corpus, "steps": steps, "train.seed": seed}
    flags = [f"--{name}={value}" for name, value in (values | {"output_dir": folder}).items()]
    run("pretrain/run.py", "--recipe", *OWN[arm], *flags, *OWN_FLAGS)
    shutil.rmtree(folder / "checkpoints")
    return cpu_clock() - start


def train_peer(arm: str, model: str, documents: Path, steps: int, seed: int, folder: Path) -> float:
    """Trains a peer on the CPU and writes `folder`/hf; returns the CPU seconds, without those that cut the text."""
    import sentence_transformers  # noqa: F401 (its import is no training time)

    length = LENGTHS[arm]
    texts: Any = (blocks if arm == "mlm" else passages)(documents, model, length)
    start = cpu_clock()
    options: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "seed": seed,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    } | PEERS[arm]
    set_seed(seed)
    with quiet_transformers():
        if arm == "mlm":
            trained = train_mlm(model, texts, options)
        else:
            trained = train_sentence_encoder(arm, model, texts, length, options)
        trained.save_pretrained(folder / "hf")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "hf")
    return cpu_clock() - start


def train_mlm(path: str, inputs: Any, options: Mapping[str, Any]) -> Any:
    """Returns the model after masked LM with transformers' Trainer and collator; a missing head starts at random."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model = AutoModelForMaskedLM.from_pretrained(path)
    collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(path))
    arguments = TrainingArguments(**options)
    Trainer(model=model, args=arguments, train_dataset=inputs, data_collator=collator).train()
    return model


def train_sentence_encoder(
    arm: str, path: str, texts: Sequence[str], length: int, options: Mapping[str, Any]
) -> Any:
    """Returns the encoder after TSDAE (embedding: [CLS]) or SimCSE (embedding: mean) by sentence-transformers."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules

    encoder = modules.Transformer(path, max_seq_length=length)
    size, mode = encoder.get_embedding_dimension(), "cls" if arm == "tsdae" else "mean"
    model = st.SentenceTransformer(modules=[encoder, modules.Pooling(size, mode)], device="cpu")
    loss: Any
    if arm == "tsdae":
        generator = random.Random(options["seed"])
        data = Dataset.from_dict({"text": list(texts)})
        data.set_transform(  # noise anew in each pass
            lambda batch: {"noisy": [without_words(t, generator) for t in batch["text"]], **batch}
        )
        loss = losses.DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True)
    else:  # each text is its own positive: only dropout differs
        data = Dataset.from_dict({"anchor": list(texts), "positive": list(texts)})
        loss = losses.MultipleNegativesRankingLoss(model)
    arguments = st.SentenceTransformerTrainingArguments(**options)
    st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=loss
    ).train()
    return model.transformers_model


def without_words(text: str, generator: random.Random) -> str:
    """Returns the text without most of its words, at least one kept: the noise of TSDAE."""
    words = text.split()
    return " ".join([word for word in words if generator.random() > DELETED] or words[:1])
