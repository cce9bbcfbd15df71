"""Refusals and answers do not depend on assertions, which `python -O` leaves out."""

import os
import subprocess
import sys

import pytest

from tests.helpers.builders import REPOSITORY

TESTS = [
    f"tests/{name}" for name in ("conf/test_guides.py", *(f"pipelines/{n}" for n in ("api", "engine_process", "serve")))
]


@pytest.mark.long
def test_the_server_holds_without_assertions() -> None:
    """pytest keeps the assertions of the tests themselves. The variable is -O for the servers that they start, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not long", "-p", "no:cacheprovider", *TESTS]
    environment = os.environ | {"PYTHONOPTIMIZE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
