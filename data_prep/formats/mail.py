"""Mail: archives (mbox, pipermail) and single messages, one document a message."""

import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage, MIMEPart

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, document, known_encoding, open_bytes
from data_prep.formats.web import visible_text
from data_prep.ledger import Left, left, size
from data_prep.settings import BuildOptions

_FROM = re.compile(rb"From \S+.*\d:\d\d.*\d{4}\s*$")  # the line before each message
_ARCHIVE_BEGINS = re.compile(r"From \S+[^\n]*\d:\d\d[^\n]*\d{4}\r?\n[A-Z][\w-]*: ")
_MESSAGE_BEGINS = re.compile(
    r"(?:Return-Path|Received|Delivered-To|MIME-Version|Message-ID): [^\n]*\n"
)
_QUOTED = re.compile(r"(?m)^(?:[^\n>]{1,200}(?:\n[^\n>]{1,100})?:\n+)?(?:>[^\n]*(?:\n|\Z))+")


def _mbox(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the messages of an archive."""
    lines, follows_blank, number = list[bytes](), True, 0
    with open_bytes(file) as stream:
        while line := stream.readline(base.LONGEST_RECORD):
            if follows_blank and _FROM.match(line):
                if lines:
                    yield _message(file, number, b"".join(lines), settings)
                    number += 1
                lines = []
            else:
                lines.append(line)
            follows_blank = not line.strip()
    yield _message(file, number, b"".join(lines), settings)


def _eml(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    yield _message(file, 0, base.whole(file), settings)


def _message(file: SourceFile, number: int, data: bytes, settings: BuildOptions) -> Record:
    """Returns the body of a message as a document, without what it quotes and its attachments."""
    message = email.message_from_bytes(data, EmailMessage, policy=email.policy.default)
    body, out = message.get_body(("plain", "html")), list[Left]()
    text = _text_of(body) if body is not None else ""
    if body is not None and body.get_content_type() == "text/html":
        page = text
        text = visible_text(page)[1]
    for part in message.walk():
        if part.is_attachment() or (body is None and not part.is_multipart()):
            name = f"{part.get_filename('without a name')}: {part.get_content_type()}"
            is_text = part.get_content_maintype() == "text"
            out.append(Left("attachments", name, size(_text_of(part)) if is_text else 0))
    if "markup" in settings.rules:
        out += [left("lines_quoted", quoted[0]) for quoted in _QUOTED.finditer(text)]
        text = _QUOTED.sub("", text)
    title = str(message.get("Subject") or base.stem(file))
    return document(file, number, title, text, layout="plain", left=tuple(out))


def _text_of(part: MIMEPart) -> str:
    data = part.get_payload(decode=True)
    encoding = known_encoding(part.get_content_charset() or "")
    return data.decode(encoding or "utf-8", "replace") if isinstance(data, bytes) else ""


base.register(
    Format("mbox", _mbox, (".mbox",), _ARCHIVE_BEGINS),
    Format("eml", _eml, (".eml", ".mht", ".mhtml"), _MESSAGE_BEGINS),
)
