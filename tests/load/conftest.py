"""Certificates for servers that speak TLS."""

from __future__ import annotations

import ssl
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
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ca.pem")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the other's servers don't belong to."""
    return make_authority(tmp_path_factory.mktemp("tls") / "other.pem")
