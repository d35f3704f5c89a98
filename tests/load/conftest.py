"""Certificates for servers that speak TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme


class Authority(NamedTuple):
    """A certificate authority: the context of a server that it vouches for, and the file that a client trusts."""

    server: ssl.SSLContext
    ca_file: str


def make_authority(path: Path) -> Authority:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost", "::1").configure_cert(context)
    authority.cert_pem.write_to_path(str(path))
    return Authority(context, str(path))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    """An authority that the client trusts, in the way its users make it trust one."""
    made = make_authority(tmp_path_factory.mktemp("tls") / "ca.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", made.ca_file)
        yield made


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the client does not trust."""
    return make_authority(tmp_path_factory.mktemp("tls") / "other.pem")
