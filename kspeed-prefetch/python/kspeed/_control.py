"""The mount's control socket: HTTP over a Unix socket."""

import http.client
import json
import os
import socket

# Seconds within which the daemon connects, and answers.
CONNECT_TIMEOUT = 5
ANSWER_TIMEOUT = 120


class ControlError(Exception):
    """The daemon can't be reached, or refuses; the message says why."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("kspeed", timeout=ANSWER_TIMEOUT)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT)
        self.sock.connect(self._path)
        self.sock.settimeout(self.timeout)


def mount_of(path):
    """The mountpoint that ``path`` is below and its daemon's control socket.

    Returns ``(mountpoint, socket)``, or ``None`` outside of KSpeed mounts.
    """
    at = os.path.abspath(os.fspath(path))
    while True:
        try:
            with open(os.path.join(at, ".kspeed", "status")) as f:
                return at, json.load(f)["control"]
        except (OSError, ValueError, KeyError):
            pass
        above = os.path.dirname(at)
        if above == at:
            return None
        at = above


def post(control, path, body):
    """Sends JSON; the answer's lines, each parsed.

    Raises ControlError if the daemon can't be reached or refuses.
    """
    connection = _Connection(control)
    try:
        connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as e:
        raise ControlError(f"{control}: the daemon does not answer ({e})") from e
    finally:
        connection.close()
    if answer.status != 200:
        raise ControlError(f"{control}: {text.strip() or answer.reason}")
    return [json.loads(line) for line in text.splitlines() if line]
