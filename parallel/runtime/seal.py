"""Values that only who knows the run's token can have written: a keyed hash stands before each (RFC 2104).

torch's stores have no accounts: who reaches the port of one can list, read and write all of its keys.
"""

import hmac

TOKEN = "VERL_MEGATRON_TOKEN"  # environment variable of all processes of a run on several hosts
HASH = "sha256"
HASH_BYTES = 32


def seal(name: str, value: bytes, token: str) -> bytes:
    """Return `value` behind its hash, which also covers the name: a value does not fit another key."""
    return _hash(name, value, token) + value


def unseal(name: str, sealed: bytes, token: str) -> bytes:
    """Return the value that `seal` got.

    Raises:
        ValueError: it was sealed with another token, or for another name, or has changed.
    """
    value = sealed[HASH_BYTES:]
    if not hmac.compare_digest(_hash(name, value, token), sealed[:HASH_BYTES]):
        raise ValueError(f"{name} was not written with this run's token; give all hosts the same {TOKEN}")
    return value


def _hash(name: str, value: bytes, token: str) -> bytes:
    keyed = hmac.new(token.encode(), name.encode() + b"\0", HASH)
    keyed.update(value)
    return keyed.digest()
