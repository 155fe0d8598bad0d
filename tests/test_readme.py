"""README says what works: every command in it is run, and its example is the file that it names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


def test_the_pass_in_readme_is_the_file_that_tests_run() -> None:
    shown = re.search(r"<!-- my_passes.py -->\n```python\n(.*?)```", README, re.S)
    assert shown is not None
    assert shown[1] == (ROOT / "docs/examples/my_passes.py").read_text(encoding="utf-8")
    body = shown[1].partition("import torch")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


def test_the_two_setup_commands_are_there() -> None:
    found = commands()
    assert "pip install -e '.[cpu]'" in found
    assert "pip install -e '.[dev]'" in found
    assert "pytest -n 2" in found


@pytest.mark.slow
def test_every_qopt_command_of_readme_works(tmp_path: Path) -> None:
    # one after the other, in one folder, as a reader would type them
    for name in ("docs", "tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "QOPT_CACHE_DIR": str(tmp_path / "cache")}
    said = {}
    for command in commands():
        words = shlex.split(command)
        if words[0] not in ("qopt", "python"):  # pip and pytest are what CI itself runs
            continue
        assert shutil.which("qopt")
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command] = done.stdout
    answer = next(text for command, text in said.items() if "capital of France" in command)
    assert answer.strip() == "The capital of France is Paris."
    times = next(text for command, text in said.items() if "compile_time" in command)
    rows = [re.split(r"  +", line) for line in times.splitlines()]
    assert [row[0] for row in rows[1:]] == ["qopt, check off", "builder", "qopt, default check"]
    assert all(0.2 < float(row[2]) < 20 and 100 < float(row[3]) < 5000 for row in rows[1:])
    mine = next(text for command, text in said.items() if "my-silu-mul" in command)
    row = next(line for line in mine.splitlines() if line.startswith("my-silu-mul"))
    assert row.split()[1] == "30"
