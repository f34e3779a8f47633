"""Addresses: subnets and ports that two clusters never share, and what a taken port says."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from pd_operator.local.network import AddressTaken, ClientPort, Subnet, listens


def test_subnets_are_disjoint() -> None:
    first, second = Subnet(), Subnet()
    try:
        assert first.prefix != second.prefix
    finally:
        first.close()
        second.close()


def test_an_address_comes_again_as_late_as_possible() -> None:
    subnet = Subnet()
    try:
        seen = []
        for _ in range(254):
            seen.append(subnet.allocate())
            subnet.release(seen[-1])
        assert len(set(seen)) == 254
        assert subnet.allocate() == seen[0]
    finally:
        subnet.close()


def test_a_full_subnet_says_so() -> None:
    subnet = Subnet()
    try:
        taken = {subnet.allocate() for _ in range(254)}
        assert len(taken) == 254
        with pytest.raises(AddressTaken, match="all 254 pod addresses are in use"):
            subnet.allocate()
        subnet.release(f"{subnet.prefix}.7")
        assert subnet.allocate() == f"{subnet.prefix}.7"
    finally:
        subnet.close()


def test_a_port_belongs_to_one_cluster() -> None:
    port = ClientPort(0)
    try:
        with pytest.raises(AddressTaken, match=f"port {port.port} is used by another PDCluster"):
            ClientPort(port.port)
    finally:
        port.close()
    ClientPort(port.port).close()


def test_a_port_of_another_program() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        message = f"port {number} on 127.0.0.1 is used by another program; choose another with"
        for _ in range(2):  # a refused claim leaves nothing behind
            with pytest.raises(AddressTaken, match=message):
                ClientPort(number)


def test_routers_share_a_claimed_port() -> None:
    with closing(ClientPort(0)) as port:
        first, second = socket.socket(), socket.socket()
        with first, second:
            for one in (first, second):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind(("127.0.0.1", port.port))
                one.listen()


_PARENT = """
import socket, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
_CHILD = """
import socket
import subprocess
import sys
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    s.listen()
    print(s.getsockname()[1], flush=True)
    input()
"""


def test_a_process_that_one_started_listens_for_it() -> None:
    command = [sys.executable, "-c", _PARENT, _CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        address = ("127.0.0.1", int(parent.stdout.readline()))
        assert listens(parent.pid, address)
        assert not listens(os.getpid(), address)
        parent.communicate("\n", timeout=30)


def test_who_listens() -> None:
    with socket.socket() as one:
        one.bind(("127.9.8.7", 0))
        address = one.getsockname()
        assert not listens(os.getpid(), address)
        one.listen()
        assert listens(os.getpid(), address)
        assert not listens(1, address)
        assert not listens(os.getpid(), ("127.9.8.8", address[1]))
    assert not listens(os.getpid(), address)
    assert not listens(2**22 + 1, address)
