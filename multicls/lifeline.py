"""A connection between the ranks that ends a rank when another one is gone.

On GPUs a collective neither fails nor returns when a rank is missing, and its caller waits for ever. So every rank
keeps a TCP connection to rank 0 on which nothing is sent before the end. The kernel closes the connections of a process
that dies, for whatever reason; TCP keepalive finds a lost node. Nobody sends signs of life, so a slow rank is never
mistaken for a dead one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Any

GRACE = 3.0  # seconds for the main thread to end with an error of its own, which tells more
GREETING = 3.0  # seconds from a connection until the other side has said who it is
MEETING = 120.0  # seconds in which all ranks connect; they have just met in the process group
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # a lost node is found after 5 + 3 x 2 seconds
MESSAGE = struct.Struct("!i")  # the number of a lost rank, or GOODBYE
GOODBYE = -1
KEY = "lifeline"


class Lifeline:
    """Ends this process with exit code 1 when another rank ends without having called `leave`.

    All ranks create it together, with the process group's key-value store and the name or address of rank 0's node.
    Processes forked later have no part in it.
    """

    def __init__(self, store: Any, rank: int, world_size: int, host: str) -> None:
        self._rank = rank
        self._left = False
        self._peers = _accept(store, world_size) if rank == 0 else {0: _connect(store, rank, host)}
        for peer in self._peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                if hasattr(socket, option):  # macOS lacks one
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        os.register_at_fork(after_in_child=self._close)  # or a loader process keeps the connections of a dead rank open
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def leave(self) -> None:
        """Says goodbye to the other ranks and waits a moment for theirs; from now on this rank may end."""
        self._left = True
        self._send(GOODBYE)
        self._watcher.join(GRACE)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    message = _receive(key.fileobj)
                    if message != GOODBYE:
                        self._end(lost=key.data if message is None else message)
                    selector.unregister(key.fileobj)

    def _end(self, lost: int) -> None:
        if self._rank == 0:
            self._send(lost)
        time.sleep(0 if self._left else GRACE)
        if not self._left:
            text = f"error: rank {self._rank} lost contact with rank {lost}, whose own output may say why it ended; "
            with contextlib.suppress(OSError):
                os.write(2, f"{text}give the same command again to go on from what is saved\n".encode())
            os._exit(1)

    def _send(self, message: int) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # gone
                peer.sendall(MESSAGE.pack(message))

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _accept(store: Any, world_size: int) -> dict[int, socket.socket]:
    """Connections of all other ranks by rank. What connects without the token, a port scanner perhaps, is left out."""
    token = secrets.token_bytes(16)
    peers: dict[int, socket.socket] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both) as server:
        server.settimeout(MEETING)
        store.set(KEY, f"{server.getsockname()[1]} {token.hex()}")
        while len(peers) < world_size - 1:
            peer, _ = server.accept()
            peer.settimeout(GREETING)
            with contextlib.suppress(OSError):
                if secrets.compare_digest(peer.recv(len(token), socket.MSG_WAITALL), token):
                    rank = _receive(peer)
                    if rank is not None:
                        peers[rank] = peer
    return peers


def _connect(store: Any, rank: int, host: str) -> socket.socket:
    port, token = store.get(KEY).decode().split()
    peer = socket.create_connection((host, int(port)), MEETING)
    peer.sendall(bytes.fromhex(token) + MESSAGE.pack(rank))
    return peer


def _receive(peer: Any) -> int | None:
    """The next message; None if the connection has ended."""
    try:
        data = peer.recv(MESSAGE.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return MESSAGE.unpack(data)[0] if len(data) == MESSAGE.size else None
