"""How long to go on after failures: back-off, and what a server asks for."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping
from threading import Event

TRIES = 6

_LONGEST_WAIT = 30.0
_LONGEST_ASKED_WAIT = 600.0
_TRANSIENT = (408, 429, 500, 502, 503, 504)

_log = logging.getLogger("reshard")


class Patience:
    """How often to try again, and how long to wait before. `stop`: an event that ends all waits."""

    def __init__(self, tries: int = TRIES, stop: Event | None = None) -> None:
        self._tries = tries
        self._failures = 0
        self._stop = stop or Event()

    def renew(self) -> None:
        """Something arrived: failures before it do not count."""
        self._failures = 0

    def spend(self, error: Exception, why: str) -> None:
        """Wait, and say `why`; or raise the error where waiting does not help.

        An error with a `response` is what a server answered; any other one broke the connection.
        """
        response = getattr(error, "response", None)
        self._failures += 1
        if self._failures == self._tries or not is_transient(error):
            raise error
        wait = _asked_wait(response.headers) if response is not None else None
        if wait is None:
            backoff = min(_LONGEST_WAIT, 2.0 ** (self._failures - 1))
            wait = backoff * random.uniform(0.5, 1.0)  # so that many nodes do not return at once
        if wait > _LONGEST_ASKED_WAIT:
            raise error
        _log.warning("%s; trying again in %.0f s", why, wait)
        if self._stop.wait(wait):
            raise error


def is_transient(error: Exception) -> bool:
    """Whether trying again may help: the connection broke, or the server has had enough."""
    response = getattr(error, "response", None)
    return response is None or response.status_code in _TRANSIENT


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds that a reply asks to wait; None where it does not say."""
    used_up = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})", headers.get("RateLimit", ""))
    if used_up:
        return float(used_up[1])
    asked = headers.get("Retry-After", "").strip()
    return float(asked) if re.fullmatch(r"[0-9]{1,6}", asked) else None
