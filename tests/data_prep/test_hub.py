"""Streaming from the hub, against a server on this machine that speaks as much of the hub's protocol as it takes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import run
from multicls.corpus import Corpus
from tests.data_prep.conftest import story

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "wikimedia/wikipedia"


class Hub(BaseHTTPRequestHandler):
    """One data set repository; `files` are its contents."""

    files: dict[str, bytes]
    card: dict[str, Any]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        self.asked.append(f"POST {self.path} {body[:80]}")
        paths = json.loads(body).get("paths", []) if body.startswith("{") else []
        self.send_json([self.entry(name) for name in self.files if name in paths])

    def answer(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].replace("%2F", "/")
        api = f"/api/datasets/{REPOSITORY}"
        if path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/{SHA}").strip("/")
            below = [name for name in self.files if name.startswith(folder and folder + "/")]
            folders = {} if folder else {name.partition("/")[0]: None for name in below if "/" in name}
            inside = [self.entry(name) for name in below if folder or "/" not in name]
            self.send_json(inside + [{"type": "directory", "path": name, "oid": SHA} for name in folders])
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{SHA}"):
            siblings = [{"rfilename": name} for name in self.files]
            self.send_json(
                {
                    "id": REPOSITORY,
                    "sha": SHA,
                    "private": False,
                    "tags": [],
                    "siblings": siblings,
                    "gated": False,
                    "cardData": self.card,
                }
            )
        elif path.startswith(f"/datasets/{REPOSITORY}/resolve/"):
            self.send_file(path.split("/", 6)[6])
        else:
            self.send_error(404)

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_file(self, name: str) -> None:
        if name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = self.files[name]
        span = self.headers.get("Range", "")
        first, last = 0, len(data) - 1
        if span.startswith("bytes="):
            low, _, high = span.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[first : last + 1])

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that holds a Wikipedia of twenty articles in two Parquet files."""
    name = "20231101.en"
    split = {"split": "train", "path": f"{name}/train-*"}
    splits = [{"name": "train", "num_bytes": 12_000, "num_examples": 20}]
    features = [{"name": column, "dtype": "string"} for column in ("id", "url", "title", "text")]
    Hub.card = {
        "configs": [{"config_name": name, "data_files": [split]}],
        "dataset_info": [{"config_name": name, "features": features, "splits": splits, "dataset_size": 12_000}],
    }
    files = {"README.md": f"---\n{json.dumps(Hub.card)}\n---\n".encode()}
    for part in range(2):
        numbers = range(10 * part, 10 * part + 10)
        rows = [
            {"id": str(i), "url": "", "title": f"Article {i}", "text": story(8, i) + "\n\nReferences\n\nA book."}
            for i in numbers
        ]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        files[f"20231101.en/train-{part:05d}-of-00002.parquet"] = sink.getvalue().to_pybytes()
    Hub.files, Hub.asked = files, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.mark.slow
def test_wikipedia_streams_from_the_hub(hub: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    words = [sys.executable, run.__file__, "--input", "wikipedia", "--tokenizer", str(tiny_tokenizer), "--output"]
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run([*words, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + "\n".join(Hub.asked)
    assert "plan: 2 data sets of unknown size" in done.stdout
    corpus = Corpus.open(tmp_path / "out")
    assert [corpus.row(i).title for i in range(20)] == [f"Article {i}" for i in range(20)]
    assert corpus.manifest["sources"].keys() == {"wikipedia"} and corpus.manifest["dropped"] == {"lines_end_matter": 40}
    missing = subprocess.run(
        [*words, str(tmp_path / "other"), "--input", "owner/none"], env=environment, capture_output=True, text=True
    )
    assert missing.returncode == 2 and "owner/none" in missing.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_what_was_loaded_before_is_used_offline(hub: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    words = [sys.executable, run.__file__, "--input", "wikipedia", "--tokenizer", str(tiny_tokenizer), "--output"]
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    environment["HF_HOME"] = str(tmp_path / "home")
    # datasets' threads sometimes abort the interpreter when it ends, so this one ends without its exit handlers.
    load = f"import datasets, os; datasets.load_dataset({REPOSITORY!r}, '20231101.en', split='train'); os._exit(0)"
    subprocess.run([sys.executable, "-c", load], env=environment, check=True, capture_output=True)
    Hub.asked.clear()
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([*words, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Hub.asked and Corpus.open(tmp_path / "out").num_documents == 20
