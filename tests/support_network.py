"""Machines of a network of their own, on this one: network namespaces on a bridge, each of which can be cut off and connected again."""

from __future__ import annotations

import os
import random
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support_programs import program, require_root


class Network:
    """`machines` namespaces. Each has the interface `eth0`; this machine is there as well, at `here`."""

    def __init__(self, machines: int) -> None:
        self._name = f"st{uuid.uuid4().hex[:6]}"
        self._prefix = f"10.{random.randrange(128, 255)}.{random.randrange(1, 255)}"
        self._machines = machines
        self.here = f"{self._prefix}.1"

    def address(self, machine: int) -> str:
        return f"{self._prefix}.{machine + 2}"

    @property
    def interface(self) -> str:
        """That has `here`."""
        return self._name

    def namespace(self, machine: int) -> str:
        return f"{self._name}-{machine}"

    def cut(self, machine: int) -> None:
        """Nothing gets in or out any more, and nobody is notified."""
        _ip("link", "set", self._port(machine), "nomaster")

    def heal(self, machine: int) -> None:
        _ip("link", "set", self._port(machine), "master", self._name)

    def create(self) -> None:
        # An address of its own: with that of a port, this machine would still get what comes through it once it is cut.
        own = "02:" + ":".join(f"{random.randrange(256):02x}" for _ in range(5))
        _ip("link", "add", self._name, "address", own, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for machine in range(self._machines):
            namespace = self.namespace(machine)
            _ip("netns", "add", namespace)
            _ip(
                "link", "add", self._port(machine), "type", "veth", "peer", "name", "eth0", "netns", namespace
            )
            _ip("link", "set", self._port(machine), "up")
            self.heal(machine)
            _ip("-n", namespace, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", interface, "up")

    def remove(self) -> None:
        for machine in range(self._machines):
            _ip("netns", "del", self.namespace(machine), must_work=False)
            _ip("link", "del", self._port(machine), must_work=False)
        _ip("link", "del", self._name, must_work=False)

    def _port(self, machine: int) -> str:
        return f"{self._name}p{machine}"


@contextmanager
def network(machines: int) -> Iterator[Network]:
    """Skips the test where this system has no network namespaces."""
    require_root("network namespaces")
    made = Network(machines)
    try:
        try:
            made.create()
        except subprocess.CalledProcessError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"needs network namespaces: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()


def _ip(*words: str, must_work: bool = True) -> None:
    subprocess.run([program("ip"), *words], check=must_work, capture_output=True, timeout=60)
