"""Fixtures of all tests: no network, the folder of real data, a tiny BERT."""

from __future__ import annotations

import os
import signal
import socket
import string
from pathlib import Path
from typing import Any

import pytest

# Before anything imports Hugging Face libraries, and for every process that a test starts.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side: a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in every background job of a script; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "tests/test_readme.py",
    "tests/slurm",
    "tests/test_docs.py",
    "tests/test_extending.py",
    *(
        f"tests/pretrain/test_{name}.py"
        for name in ("ds_configs", "resume", "export", "run", "learning", "crashes", "nodes")
    ),
    *(f"tests/data_prep/test_{name}.py" for name in ("prepare", "read", "hostile", "resume")),
    "tests/finetune/train/test_ranks.py",
    "tests/finetune/test_run.py",
    "tests/multicls/test_without_project.py",
)


def whole(nodeid: str) -> str:
    """Returns the group of tests that runs in one process: a file, or all of tests/slurm (two shared node names)."""
    return next((name for name in LONGEST if nodeid.startswith(name)), nodeid.split("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a long one at the end would leave the other processes idle."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(whole(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)  # known when pytest-xdist is there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole files."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return whole(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Any:
    """Lets sockets connect to this machine only."""

    def guarded(method: str) -> Any:
        original = getattr(socket.socket, method)

        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
                raise RuntimeError(f"a test tried to reach {address}")
            return original(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for method in ("connect", "connect_ex"):
            patch.setattr(socket.socket, method, guarded(method))
        yield


@pytest.fixture(scope="session")
def multicls_data() -> Path:
    """The folder of real data, from the environment variable MULTICLS_DATA."""
    folder = os.environ.get("MULTICLS_DATA")
    if not folder:
        pytest.skip("needs real data: set MULTICLS_DATA to its folder")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `BertForPreTraining` of random weights (3 layers x 32) and a small WordPiece vocabulary."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

    special = ["[PAD]", *(f"[unused{n}]" for n in range(10)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = string.ascii_lowercase
    words = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrs"]  # 240 syllables for words
    inside = [f"##{character}" for character in letters + string.digits]
    tokens = [*special, *letters, *string.digits, *string.punctuation, *inside, *words]
    tokenizer = Tokenizer(models.WordPiece({t: n for n, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    folder = tmp_path_factory.mktemp("tiny_bert")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForPreTraining(config).save_pretrained(folder)
    return folder
