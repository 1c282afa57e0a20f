"""HTTPS in front of a stand-in, with a certificate that signs itself: no client trusts it unless it is told to."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PIECE = b"/fileUploads/"


@dataclass
class Tunnel:
    """HTTPS in front of the server, which speaks HTTP; may cut one connection while a piece of a file is sent."""

    server: str
    context: ssl.SSLContext
    listening: socket.socket
    cut_piece: int = 0
    pieces: int = 0
    # Whether anything came through.
    carried: bool = False

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.listening.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                accepted, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with suppress(OSError), self.context.wrap_socket(accepted, server_side=True) as client:
            address = urlsplit(self.server)
            with socket.create_connection((str(address.hostname), address.port or 80)) as server:
                back = threading.Thread(target=self._carry_back, args=(server, client), daemon=True)
                back.start()
                self._carry(client, server)

    def _carry(self, client: ssl.SSLSocket, server: socket.socket) -> None:
        while data := client.recv(65536):
            self.carried = True
            if data.startswith(b"PUT ") and PIECE in data:
                self.pieces += 1
                if self.pieces == self.cut_piece:
                    return
            server.sendall(data)

    def _carry_back(self, server: socket.socket, client: ssl.SSLSocket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)


def self_signed(folder: Path) -> Path:
    """A certificate that signs itself, with its key in the same file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    file = folder / "server.pem"
    file.write_bytes(made.public_bytes(plain[2]) + key.private_bytes(plain[2], plain[1], plain[0]))
    return file


@contextmanager
def tunnelled(server: str, certificate: Path) -> Iterator[Tunnel]:
    """Listen with HTTPS on loopback, and pass everything on to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = Tunnel(server, context, listening)
        threading.Thread(target=made.run, daemon=True).start()
        yield made
