"""Addresses of processes, as URLs and other programs take them."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets.

    Example:
        >>> host_port("10.0.0.1", 80), host_port("fd00::1", 80)
        ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
