"""The versions that environments are made of: what setup.py asks for, each exactly once."""

import re
import runpy
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tools" / "constraints"
PYTHONS = ("3.8", "3.9", "3.10", "3.11")


@pytest.fixture
def requirements(monkeypatch):
    """Return what `dsoftmax[cpu,test]` requires."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("setup.py", run_name="__main__")
    extras = given["extras_require"]
    return [Requirement(one) for one in given["install_requires"] + extras["cpu"] + extras["test"]]


def read_versions(python):
    """Return the version of each package by its name."""
    lines = (FOLDER / f"python{python}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    # Exact versions alone: no addresses, no options of pip.
    unusual = [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[a-z0-9.]+", pin)]
    assert not unusual
    versions = {canonicalize_name(name): version for name, version in map(split, pins)}
    assert len(versions) == len(pins)
    return versions


def split(pin):
    return pin.split("==")


def test_there_is_a_file_for_each_python():
    names = sorted(path.name for path in FOLDER.iterdir())
    assert names == sorted(f"python{python}.txt" for python in PYTHONS)


@pytest.mark.parametrize("python", PYTHONS)
def test_each_requirement_has_a_legal_version(python, requirements):
    versions = read_versions(python)
    asked = [
        one
        for one in requirements
        if not one.marker or one.marker.evaluate({"python_version": python})
    ]
    assert len(asked) >= 12
    missing = [str(one) for one in asked if canonicalize_name(one.name) not in versions]
    assert not missing
    illegal = [
        f"{one}: {versions[canonicalize_name(one.name)]}"
        for one in asked
        if versions[canonicalize_name(one.name)] not in one.specifier
    ]
    assert not illegal
