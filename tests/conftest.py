"""Fixtures of all tests: no network, the folder of real data, a tiny BERT and corpus."""

import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

# Before anything imports Hugging Face libraries, and for every process that a test starts.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side: a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = [  # files and folders
    "tests/slurm",
    "tests/test_pages.py",
    "tests/pretrain/test_resume.py",
    "tests/finetune/test_training.py",
    "tests/data_prep/test_build.py",
    "tests/test_encoders_whole_way.py",
    "tests/pretrain/test_crashes.py",
    "tests/pretrain/test_ds_configs.py",
    "tests/pretrain/test_run.py",
    "tests/finetune/test_grid.py",
    "tests/multicls/test_without_project.py",
    "tests/pretrain/test_learning.py",
    "tests/pretrain/test_export.py",
    "tests/multicls/test_encoders.py",
    "tests/finetune/test_run.py",
    "tests/data_prep/test_examples.py",
]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, each in one process, and SLURM's in one: a long one at the end leaves others idle."""
    order = {}
    for item in items:
        file = item.nodeid.split("::")[0]
        group = next((name for name in LONGEST if file.startswith(name)), file)
        order[item] = LONGEST.index(group) if group in LONGEST else len(LONGEST)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=order.__getitem__)


def this_machine_only(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: sockets connect to this machine only."""
    is_ip = event == "socket.connect" and arguments[0].family in (socket.AF_INET, socket.AF_INET6)
    if is_ip and arguments[1][0] not in ("127.0.0.1", "::1", "localhost"):
        raise RuntimeError(f"a test tried to reach {arguments[1]}")


sys.addaudithook(this_machine_only)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Takes back the variables that a test sets, as to join a process group; later tests would inherit them."""
    with patch.dict(os.environ):
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
    from transformers import BertForPreTraining

    from tests.encoders import encoder_config, wordpiece

    folder, tokenizer = tmp_path_factory.mktemp("tiny_bert"), wordpiece()
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config: Any = encoder_config("bert", tokenizer)
        BertForPreTraining(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with something to learn: 400 documents of six invented sentences.

    The words determine the topic, and the first word determines whether a sentence opens or closes.
    """
    from data_prep.run import main
    from tests.encoders import WORDS

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    opening, closing, *words = WORDS
    topics = [words[start : start + 10] for start in range(0, 200, 10)]
    rng = random.Random(0)
    for number in range(400):
        topic = rng.choice(topics)
        lines = [" ".join([first, *rng.choices(topic, k=9)]) for first in [opening, closing] * 3]
        text = " ".join(f"{line.capitalize()}." for line in lines)
        (folder / "text" / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    source = ["--input", str(folder / "text"), "--tokenizer", str(tiny_bert)]
    main([*source, "--output", str(folder / "shards"), "--workers", "1"])
    return folder / "shards"
