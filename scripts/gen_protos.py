"""Regenerates the committed Python stubs of protos/ from the .proto files.

Run with `make protos`. With `--check DIR` the stubs are written to DIR instead, so that a test can compare.
"""

from __future__ import annotations

import argparse
import importlib.resources
import subprocess
import sys
from pathlib import Path

from google.rpc import status_pb2

ROOT = Path(__file__).resolve().parent.parent / "protos"


def generate(out_dir: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi` files for every proto below protos/ to `out_dir`."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    google = Path(status_pb2.__file__).parent.parent.parent
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    plugins = Path(sys.executable).parent
    command = [
        sys.executable, "-m", "grpc_tools.protoc",
        f"-I{ROOT}", f"-I{google}", f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out_dir}", f"--grpc_python_out={out_dir}",
        f"--mypy_out={out_dir}", f"--mypy_grpc_out={out_dir}",
        *protos,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    """Command line: no argument rewrites protos/, `--check DIR` writes to DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, default=ROOT, metavar="DIR")
    generate(parser.parse_args().check)


if __name__ == "__main__":
    main()
