"""Rejections and answers do not depend on assertions, which `python -O` removes."""

import os
import subprocess
import sys

import pytest

from tests.helpers.builders import REPOSITORY

# These read, reject and answer requests: in an application in the test's process, and in a server with the engine's
# process.
FILES = {
    "conf": ("guides",),
    "pipelines/server/api": ("answers", "batch_lines", "conversation", "requests", "responses", "settings"),
    "pipelines/replicas/engine_process": ("channel", "client", "frames", "gate", "process", "suspects"),
    "pipelines/server": (
        "admission",
        "anthropic",
        "app",
        "batches",
        "completions",
        "guard",
        "messages",
        "serve",
        "stream",
    ),
}
TESTS = [f"tests/{folder}/test_{name}.py" for folder, names in FILES.items() for name in names]


@pytest.mark.long
def test_the_server_holds_without_assertions() -> None:
    """pytest keeps the tests' own assertions. The environment variable applies -O to the servers that they start,
    too."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not long", "-p", "no:cacheprovider", *TESTS]
    environment = os.environ | {"PYTHONOPTIMIZE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
