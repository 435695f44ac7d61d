"""Write requirements-serve.lock: every package that a server needs beside torch, with the hashes of its files.

    python docs/make_lock.py

Versions are those of constraints.txt. There is a hash for each Python that the project supports, on Linux x86-64; torch
is left out with its own needs, because its build is the machine's choice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-serve.lock"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "any")
HEAD = """\
# Made by docs/make_lock.py from constraints.txt; install torch first, then
#   pip install --require-hashes --no-deps -r requirements-serve.lock
"""


def hashes(requirements: list[str], python: str) -> dict[str, str]:
    """What pip would install for one Python, as name==version, and the hash of its file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        platforms = [f"--platform={name}" for name in PLATFORMS]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", f"--target={folder}", f"--python-version={python}", *platforms]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--report", str(report), *requirements]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        f"{each['metadata']['name'].lower()}=={each['metadata']['version']}": each["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for each in found
    }


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    wanted = [each for each in wanted if not each.startswith("torch")]
    found: dict[str, set[str]] = {}
    for python in PYTHONS:
        for name, digest in hashes(wanted, python).items():
            found.setdefault(name, set()).add(digest)
    lines = [
        " \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(found[name]))])
        for name in sorted(found)
    ]
    LOCK.write_text(HEAD + "".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
