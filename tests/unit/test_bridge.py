"""The address of a bridge; the bridge itself is tested with worlds, in end_to_end/test_separate.py."""

import pytest

from parallel.bridge import ADDRESS, TOKEN, given_address


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("", "secret", f"{ADDRESS} is not set"),
        ("host:29400", "", f"{TOKEN} is not set"),
        ("host", "secret", f"{ADDRESS}='host' is no address; write HOST:PORT"),
        (":29400", "secret", "is no address"),
        ("host:0", "secret", "is no address"),
        ("host:65536", "secret", "is no address"),
        ("host:x", "secret", "is no address"),
        ("host:" + "9" * 5000, "secret", "is no address"),
    ],
)
def test_other_addresses_are_refused(address, token, words, monkeypatch):
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ValueError, match=r"; ") as refused:
        given_address()
    assert words in str(refused.value) and len(str(refused.value)) < 400
