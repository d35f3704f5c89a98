"""One keep-alive connection on a raw socket, with receive stamps from the kernel where it gives them.

The read callback stamps, keeps the bytes and schedules a look only when a response may have ended. TLS runs over
memory buffers off that path: the stamp is that of the encrypted bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable

from breakeven.clock import ANCILLARY_SIZE, KernelClock, ask_for_stamps
from breakeven.load.exchange import Exchange
from breakeven.load.later import Later

__all__ = ["Connection", "Endpoint", "words"]

READ_SIZE = 65536

#: What ends a chunked body: the last chunk, or trailers after it. A read this short may hold only a part of that.
_END, _SHORT = b"\r\n\r\n", 5


def words(error: OSError) -> str:
    """Why a connection failed; asyncio's own text names the address instead. Empty for a time-out of ours."""
    return os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else str(error)


class Endpoint:
    """Where to connect, resolved once: a run must not depend on what DNS says in its middle."""

    def __init__(self, address: tuple[socket.AddressFamily, object], tls: tuple[ssl.SSLContext, str] | None) -> None:
        self.family, self.sockaddr = address
        self.tls = tls


class Connection:
    """A connection that carries one exchange at a time.

    `exchange` sends a request and returns its `Exchange` when the response is complete or the connection is gone;
    `Exchange.complete` tells which, `failure` says why. `usable` is false once it can't carry another.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, clock: KernelClock, later: Later) -> None:
        self._loop, self._socket, self._clock, self._later = loop, sock, clock, later
        self._recv = sock.recvmsg
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._eager = True
        self._looking = False
        self._tls: _Tls | None = None
        self._unsent: bytes | memoryview = b""
        self.usable = True
        self.exchanges = 0
        self.failure: str | None = None
        self.was_reset = False
        loop.add_reader(sock.fileno(), self._on_readable)

    @classmethod
    async def open(cls, endpoint: Endpoint, clock: KernelClock, later: Later) -> Connection:
        """Connects, with TLS where the endpoint asks for it.

        Raises:
            OSError: no connection, or no agreement on TLS (`ssl.SSLError` is one).
        """
        loop = asyncio.get_running_loop()
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_stamps(sock)
            await loop.sock_connect(sock, endpoint.sockaddr)  # type: ignore[arg-type]  # typeshed knows fewer families
            tls = await _Tls.handshake(loop, sock, *endpoint.tls) if endpoint.tls else None
        except BaseException:
            sock.close()
            raise
        connection = cls(loop, sock, clock, later)
        connection._tls = tls
        return connection

    async def exchange(self, request: bytes, exchange: Exchange, now_ns: Callable[[], int]) -> None:
        """Sends `request` and fills `exchange` until the response ends or the connection is lost.

        Cancelling it closes the connection: the response would be somebody else's.
        """
        self._exchange, self._ended, self._eager = exchange, self._loop.create_future(), True
        self.exchanges += 1
        exchange.decrypt = self._tls.decrypt if self._tls else None
        wire = self._tls.encrypt(request) if self._tls else request
        if not exchange.sent_ns:
            exchange.sent_ns = now_ns()
        self._send(wire)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._exchange = None
        exchange.advance()  # what came behind the end, before this line was reached
        if self._unsent or not exchange.keep_alive:
            self.close()

    def close(self) -> None:
        """Closes the socket; harmless when it is closed already."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self.usable = False

    def abandon(self) -> None:
        """Closes it under a running exchange, which then ends as it stands."""
        self.close()
        self._end()

    def check(self) -> bool:
        """Looks at the socket unasked: libuv tells of data and a reset that come together only once, as of data.

        Returns whether there was anything.
        """
        if not self.usable:
            return False
        exchange = self._exchange
        before = len(exchange.reads) if exchange else 0
        self._on_readable()
        return not self.usable or (exchange is not None and len(exchange.reads) > before)

    def _on_readable(self) -> None:
        # The hot path: once per chunk. Nothing here may look into the bytes beyond their end.
        try:
            data, ancillary, _, _ = self._recv(READ_SIZE, ANCILLARY_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._reset(error)
            return
        exchange = self._exchange
        if exchange is None or not data:
            self._on_idle(data)
            return
        stamp_ns = self._clock.stamp(ancillary[0][2] if ancillary else None, exchange.sent_ns)
        exchange.reads.append((stamp_ns, data))
        if (self._eager or data.endswith(_END) or len(data) < _SHORT) and not self._looking:
            self._looking = True
            self._later.add(self._look, urgent=True)

    def _on_idle(self, data: bytes) -> None:
        # TLS 1.3 servers send session tickets when they like: bytes, but no answer.
        if not data:
            self._lose("the server closed the connection")
            return
        try:
            unasked = data if self._tls is None else self._tls.decrypt(data)
        except ssl.SSLError as error:
            self._lose(f"TLS: {error.reason}")
        else:
            if unasked:
                self._lose("bytes that nobody asked for")

    def _look(self, _until_ns: int) -> bool:
        self._looking = False
        exchange = self._exchange
        if exchange is None:
            return True
        exchange.advance()
        self._eager = self._tls is not None or not exchange.chunked
        if exchange.complete or exchange.broken:
            self._end()
        elif not exchange.begun:
            self.check()  # bytes but no answer: TLS says goodbye, and a reset may have come with it
        return True

    def _reset(self, error: OSError) -> None:
        self.was_reset = True
        self._lose(words(error))

    def _lose(self, why: str) -> None:
        self.close()
        self.failure = why
        if self._exchange is not None:
            if self.was_reset:
                self._exchange.advance()
            else:
                self._exchange.close()
            self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._reset(error)
            return
        self._unsent = memoryview(data)[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self._send(self._unsent)


class _Tls:
    """TLS over memory buffers, so that the socket's reads stay ours to stamp."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)

    @classmethod
    async def handshake(
        cls, loop: asyncio.AbstractEventLoop, sock: socket.socket, context: ssl.SSLContext, server_name: str
    ) -> _Tls:
        tls = cls(context, server_name)
        while True:
            try:
                tls._object.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(sock, tls._outgoing.read())
                data = await loop.sock_recv(sock, READ_SIZE)
                if not data:
                    raise ConnectionResetError("the server closed the connection in the TLS handshake") from None
                tls._incoming.write(data)
            else:
                await loop.sock_sendall(sock, tls._outgoing.read())
                return tls

    def encrypt(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """The plain bytes that `data` completes; raises `ssl.SSLError` on what is no TLS."""
        self._incoming.write(data)
        plain = []
        try:
            while data := self._object.read(READ_SIZE):
                plain.append(data)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError:
            if not plain:  # else the next call raises it again
                raise
        return b"".join(plain)
