"""The packages of the wheel: every folder with an __init__.py below a folder that pyproject.toml maps."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
with (ROOT / "pyproject.toml").open("rb") as file:
    MAPPED = tomllib.load(file)["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        package
        for name, folder in MAPPED.items()
        for package in (name, *(f"{name}.{below}" for below in find_packages(str(ROOT / folder))))
    ]
)
