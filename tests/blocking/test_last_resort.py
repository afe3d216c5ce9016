"""Warnings that a script sees, with and without its own logging."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests import children

WARNING = "cluster 3: option 'llm.Nonsense' has no effect: it is not known here"


def stderr_of(setup: str, path: Path) -> str:
    script = path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import logging, sys
            from llm_datadist import LLMConfig, LLMDataDist, LLMRole
            {setup}
            config = LLMConfig()
            config.enable_cache_manager = True
            datadist = LLMDataDist(LLMRole.PROMPT, 3)
            datadist.init({{**config.generate_options(), "llm.Nonsense": "1"}})
            datadist.finalize()
            """
        ).format(setup=setup)
    )
    command = [sys.executable, "-m", "aiodatadist.blocking", "run", str(script)]
    done = children.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stderr


def test_a_warning_is_one_line_on_stderr(tmp_path: Path) -> None:
    assert stderr_of("", tmp_path) == WARNING + "\n"


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("logging.basicConfig(format='mine %(message)s')", f"mine {WARNING}\n"),
        ("logging.basicConfig(level='ERROR')", ""),
        ("logging.getLogger('aiodatadist').setLevel('ERROR')", ""),
        ("logging.getLogger('aiodatadist').addHandler(logging.StreamHandler(sys.stdout))", ""),
        ("logging.disable()", ""),
    ],
)
def test_a_script_that_configured_logging_decides(setup: str, told: str, tmp_path: Path) -> None:
    assert stderr_of(setup, tmp_path) == told


def test_an_error_is_told_without_its_traceback(tmp_path: Path) -> None:
    setup = textwrap.dedent(
        """
        try:
            int("x")
        except ValueError:
            logging.getLogger("aiodatadist._link").exception("two\\nlines")
        """
    )
    told = stderr_of(setup, tmp_path).splitlines()
    assert told == ["two lines: ValueError: invalid literal for int() with base 10: 'x'", WARNING]
