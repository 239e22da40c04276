"""Subtitles: SRT and WebVTT, also the rolling captions of YouTube, of which each line comes twice."""

import re
from collections.abc import Iterator

from data_prep.formats.base import Format, Record, SourceFile, document, lines_of, register, stem
from data_prep.formats.tables import unescape
from data_prep.ledger import Left, left, size
from data_prep.settings import BuildOptions

_TIMES = re.compile(r"[\d:,.]+ --> .*")
_NOT_SPOKEN = re.compile(r"WEBVTT|NOTE\b|STYLE$|REGION$")  # the first line of a block of WebVTT
_TAG = re.compile(r"</?[a-z][^<>]*>|<[\d:.]+>|\{\\[^{}]*\}")
_STOP = re.compile(r"[.!?…。！？]")


def _captions(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields what is spoken in a file: sentences go on in the next cue, or none has a full stop."""
    spoken, out, block = list[str](), list[Left](), list[str]()
    for _, line in [*lines_of(file), (0, "")]:
        if line.strip():
            block.append(line.strip())
            continue
        times = next((i for i, text in enumerate(block) if _TIMES.match(text)), None)
        if times is None and block and _NOT_SPOKEN.match(block[0]):
            if block[0].startswith("NOTE"):
                out.append(left("lines_markup", "\n".join(block), len(block)))
            block = []
        for text in block[0 if times is None else times + 1 :]:
            words = unescape(_TAG.sub("", text)).strip()
            if words != text:
                out.append(Left("characters_of_html", text, size(text) - size(words)))
            if spoken and words and words == spoken[-1]:
                out.append(left("lines_repeated", words))
            elif words:
                spoken.append(words)
        block = []
    has_stops = len(_STOP.findall("\n".join(spoken))) >= len(spoken) / 20
    text = " ".join(spoken) if has_stops else "\n".join(spoken)
    layout = "paragraphs" if has_stops else "lines"
    yield document(file, 0, stem(file), text, layout=layout, left=tuple(out))


register(
    Format("srt", _captions, (".srt",)),
    Format("vtt", _captions, (".vtt",), re.compile(r"WEBVTT\b")),
)
