"""Refusals do not depend on assertions, which `python -O` leaves out."""

import subprocess
import sys

import pytest

from tests.helpers.builders import REPOSITORY

FILES = ("tests/pipelines/serve/test_guard.py", "tests/pipelines/api/test_requests.py", "tests/conf/test_guides.py")


@pytest.mark.long
def test_refusals_hold_without_assertions() -> None:
    """pytest keeps the assertions of the tests themselves."""
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
