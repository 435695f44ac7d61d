"""Write requirements-serve.lock: all packages that a server needs except torch, with the hashes of their files.

    python docs/make_lock.py

Versions come from constraints.txt, hashes are those for each supported Python on Linux x86-64. torch and its
dependencies are omitted, because their build depends on the machine.
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
    """Return name==version and file hash of each package that pip would install for a Python version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        platforms = [f"--platform={name}" for name in PLATFORMS]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", f"--target={folder}", f"--python-version={python}", *platforms]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--report", str(report), *requirements]
        subprocess.run(command, check=True)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        f"{each['metadata']['name'].lower()}=={each['metadata']['version']}": each["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for each in packages
    }


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["serve"], *extras["documents"]]
    requirements = [each for each in requirements if not each.startswith(("torch", "qkv["))]
    digests: dict[str, set[str]] = {}
    for python in PYTHONS:
        for name, digest in hashes(requirements, python).items():
            digests.setdefault(name, set()).add(digest)
    lines = [
        " \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(digests[name]))])
        for name in sorted(digests)
    ]
    LOCK.write_text(HEAD + "".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
