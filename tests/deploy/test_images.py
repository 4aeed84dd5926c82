"""What the Dockerfiles and their lock files promise; `make compose-test` builds and runs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    "scheduler": ROOT / "scheduler_svc" / "requirements.lock",
    "worker": ROOT / "worker_svc" / "requirements.lock",
}


def locked(path: Path) -> dict[str, Version]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "every line pins one version"
    assert [name for name, _ in pairs] == sorted({name for name, _ in pairs})
    return {name: Version(version) for name, version in pairs}


@pytest.mark.parametrize("service", LOCKS)
def test_a_lock_fulfils_what_the_project_asks_for(service: str) -> None:
    versions = locked(LOCKS[service])
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"][service]
    for requirement in map(Requirement, wanted):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not locked: run scripts/lock_requirements.py"
        assert version in requirement.specifier, f"{requirement} is locked to {version}"
        assert not version.local, "a local build exists on this machine only"


def test_the_backend_is_locked() -> None:
    versions = locked(ROOT / "deploy" / "build.lock")
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert versions[backend.name] in backend.specifier


def test_the_scheduler_has_no_torch() -> None:
    assert not {"torch", "transformers", "numpy", "safetensors"} & locked(LOCKS["scheduler"]).keys()
    assert "torch" in locked(LOCKS["worker"])


def test_both_images_hold_the_same_protocol() -> None:
    scheduler, worker = locked(LOCKS["scheduler"]), locked(LOCKS["worker"])
    assert {name: scheduler[name] for name in scheduler.keys() & worker.keys()} == {
        name: worker[name] for name in scheduler.keys() & worker.keys()
    }


@pytest.mark.parametrize("service", LOCKS)
def test_a_dockerfile_is_pinned_staged_and_unprivileged(service: str) -> None:
    text = (ROOT / f"{service}_svc" / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    build, final = text.split("\nFROM ")[1:]
    assert build.startswith("${BUILD_IMAGE} AS build\n")
    assert final.startswith("${PYTHON_IMAGE}\n")
    assert f"{service}_svc/requirements.lock" in build
    assert "RUN" not in final, "the final stage only copies"
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", final, re.MULTILINE), "a number: runAsNonRoot can check it"
    assert f'ENTRYPOINT ["python", "-m", "stepahead.{service}"]' in final
    assert ('! /opt/stepahead/bin/python -c "import torch"' in build) is (service == "scheduler")


def test_both_dockerfiles_start_from_the_same_image() -> None:
    images = {
        re.findall(r"^ARG PYTHON_IMAGE=(.*)$", (ROOT / f"{service}_svc" / "Dockerfile").read_text(), re.MULTILINE)[
            0
        ]
        for service in LOCKS
    }
    assert len(images) == 1


def test_the_build_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert all((ROOT / path).exists() for path in kept)
    packages = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= kept
    assert not any(path.startswith((".", "tests")) for path in kept)
