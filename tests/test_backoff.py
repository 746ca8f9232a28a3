"""Pauses between retries."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from insitu.backoff import backoff_s, retry, retry_after_s


def test_a_server_names_the_pause_in_seconds_or_as_a_date() -> None:
    assert retry_after_s({"Retry-After": "7"}) == 7
    assert retry_after_s({"Retry-After": "0.25"}) == 0.25
    asked = retry_after_s({"Retry-After": formatdate(time.time() + 30, usegmt=True)})
    assert asked is not None
    assert 25 < asked <= 30
    assert [retry_after_s({"Retry-After": text}) for text in ("", "soon", "-3", "nan", "inf")] == [None] * 5


def test_pauses_grow_up_to_a_limit_and_differ() -> None:
    pauses = [backoff_s(failures, 1.0) for failures in range(1, 40)]
    assert 0.5 <= pauses[0] <= 1.0
    assert all(0 < pause <= 60.0 for pause in pauses)
    assert pauses[-1] >= 30.0
    assert len(set(pauses[10:])) > 1


class Flaky:
    """Fails with the given errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


async def _retry(call: Flaky) -> int:
    return await retry(call, lambda e: isinstance(e, OSError), attempts=3, first_s=0.001, name="x")


async def test_a_call_is_retried_after_retryable_errors_only() -> None:
    assert await _retry(Flaky(OSError(), OSError())) == 3
    for errors, calls in (((OSError(), ValueError()), 2), ((OSError(),) * 2 + (OSError("last"),), 3)):
        call = Flaky(*errors)
        with pytest.raises(type(errors[-1])) as raised:
            await _retry(call)
        assert raised.value is errors[-1]
        assert call.calls == calls
