"""How other hosts reach this one, and whether this one reaches them."""

from __future__ import annotations

import os
import socket

SECONDS = 0.5
PORT = 9  # of the service that discards what comes; a host without it refuses, and so is there


def addresses() -> tuple[str, str]:
    """This host's address on the way to MASTER_ADDR, and that one's; "" where there is none. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", ""), PORT))
            return probe.getsockname()[0], probe.getpeername()[0]
    except OSError:  # or an address of another family
        return "", ""


def why_out_of_reach(address: str) -> str:
    """As a clause, why a host cannot be reached; "" where it answers, or has none. Looking up a name would wait."""
    if not address:
        return ""
    try:
        socket.create_connection((address, PORT), SECONDS).close()
    except ConnectionRefusedError:
        pass
    except TimeoutError:
        why = f"no answer within {SECONDS:g} s at port {PORT}"
        return f"its host {address} is out of reach ({why}): its link is cut, or it is down, or a firewall is between"
    except OSError as error:
        return f"its host {address} is out of reach ({error.strerror}): its link is cut, or it is down"
    return ""
