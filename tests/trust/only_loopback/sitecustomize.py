"""Refuses whatever leaves this machine, in every Python process that has this folder on its PYTHONPATH.

Each attempt, refused or not, is a line of the file that GRADMM_TEST_CONNECTIONS names: what was done with it, the
event, and where it was to go. Python's own sockets raise these events; native code that opens its own would not.
"""

import os
import socket
import sys

LOCAL_HOSTS = (None, "", "localhost", "127.0.0.1", "::1")

#: Audit events, and which of their arguments is a host, or an address that begins with one.
EVENTS = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
    "socket.getnameinfo": 0,
}

attempts = os.open(os.environ["GRADMM_TEST_CONNECTIONS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def only_loopback(event: str, arguments: tuple) -> None:
    if event not in EVENTS:
        return
    if isinstance(arguments[0], socket.socket) and arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
        return
    address = arguments[EVENTS[event]]
    host = address[0] if isinstance(address, tuple) else address
    host = host.decode() if isinstance(host, bytes) else host
    allowed = host in LOCAL_HOSTS
    os.write(attempts, f"{'allowed' if allowed else 'refused'} {event} {address}\n".encode())
    if not allowed:
        raise ConnectionRefusedError(f"{event}: the network is refused to this test")


sys.addaudithook(only_loopback)
