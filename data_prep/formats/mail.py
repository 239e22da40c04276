"""Mail: archives (mbox, pipermail) and single messages, one document a message."""

import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage, MIMEPart

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, document, open_bytes
from data_prep.formats.web import visible_text
from data_prep.ledger import Left, left, size
from data_prep.settings import BuildOptions, known_encoding

_FROM = re.compile(rb"From \S+.*\d:\d\d.*\d{4}\s*$")  # the line before each message
_ARCHIVE_BEGINS = re.compile(r"From \S+[^\n]*\d:\d\d[^\n]*\d{4}\r?\n[A-Z][\w-]*: ")
_MESSAGE_BEGINS = re.compile(
    r"(?:Return-Path|Received|Delivered-To|MIME-Version|Message-ID): [^\n]*\n"
)
_QUOTED = re.compile(r"(?m)^(?:[^\n>]{1,200}(?:\n[^\n>]{1,100})?:\n+)?(?:>[^\n]*(?:\n|\Z))+")


def _mbox(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the messages of an archive."""

    def message(number: int, data: bytes) -> Record:
        return base.attempt(file, number, data, lambda: _message(file, number, data, settings))

    lines, follows_blank, number = list[bytes](), True, 0
    with open_bytes(file) as stream:
        while line := stream.readline(base.LONGEST_RECORD):
            if follows_blank and _FROM.match(line):
                if lines:
                    yield message(number, b"".join(lines))
                    number += 1
                lines = []
            else:  # an archive marks such a line of the text
                lines.append(line[1:] if line.startswith(b">From ") else line)
            follows_blank = not line.strip()
    yield message(number, b"".join(lines))


def _eml(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    yield _message(file, 0, base.whole(file), settings)


def _message(file: SourceFile, number: int, data: bytes, settings: BuildOptions) -> Record:
    """Returns the text of a message as a document, without what it quotes and the files that are attached."""
    out = list[Left]()
    message = email.message_from_bytes(data, EmailMessage, policy=email.policy.default)
    text = "\n\n".join(_shown(message, out))
    if "markup" in settings.rules:
        out += [left("lines_quoted", quoted[0]) for quoted in _QUOTED.finditer(text)]
        text = _QUOTED.sub("", text)
    title = str(message.get("Subject") or base.stem(file))
    return document(file, number, title, text, layout="plain", left=tuple(out))


def _shown(part: MIMEPart, out: list[Left]) -> Iterator[str]:
    """Yields the texts of a part that a reader of mail shows, also of a forwarded message; enters files into `out`."""
    kind, is_file = part.get_content_type(), part.is_attachment() or part.get_filename() is not None
    forms = [part.get_body((name,)) for name in ("plain", "html")]  # of one text; one may be blank
    filled = [form for form in forms if form is not None and _text_of(form).strip()]
    if kind == "multipart/alternative" and filled and not is_file:
        yield from _shown(filled[0], out)
    elif part.is_multipart() and not is_file:
        for inner in part.iter_parts():
            yield from _shown(inner, out)
    elif kind in ("text/plain", "text/html") and not is_file:
        text = _text_of(part)
        yield visible_text(text)[1] if kind == "text/html" else text
    else:
        name = f"{part.get_filename('without a name')}: {kind}"
        texts = (p for p in part.walk() if p.get_content_maintype() in ("text", "multipart"))
        out.append(Left("attachments", name, sum(size(_text_of(p)) for p in texts)))


def _text_of(part: MIMEPart) -> str:
    data = part.get_payload(decode=True)
    encoding = known_encoding(part.get_content_charset() or "")
    return data.decode(encoding or "utf-8", "replace") if isinstance(data, bytes) else ""


base.register(
    Format("mbox", _mbox, (".mbox",), _ARCHIVE_BEGINS),
    Format("eml", _eml, (".eml", ".mht", ".mhtml"), _MESSAGE_BEGINS),
)
