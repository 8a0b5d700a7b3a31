"""For all tests: what the developer who runs them has set for their own work decides nothing; and calls that submit nothing."""

import os

import pytest

os.environ["EUROPA_USER_CONFIG"] = ""


@pytest.fixture
def submitted(monkeypatch):
    """The points of each call that would be submitted, in place of submitting them."""
    calls = []

    def submit(points, launch, *, sweep, command):
        calls.append(list(points))
        return 0

    import europa_exp.launch.submit as module

    monkeypatch.setattr(module, "submit", submit)
    return calls
