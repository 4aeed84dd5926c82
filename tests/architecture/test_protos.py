"""The protocol files: stubs are fresh, style is kept."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import status_pb2

from tests.architecture.proto_lint import lint
from tests.architecture.tree import GENERATED_MARKS, ROOT

PROTOS = ROOT / "protos"


def compile_protos(folder: Path, out_dir: Path) -> FileDescriptorSet:
    """Descriptors of every proto below `folder`, with source info."""
    google = Path(status_pb2.__file__).parent.parent.parent
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    out = out_dir / "descriptors.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{google}", f"-I{well_known}"]
    options = [f"--descriptor_set_out={out}", "--include_source_info"]
    subprocess.run([*command, *options, *names], check=True, cwd=folder)
    return FileDescriptorSet.FromString(out.read_bytes())


def stubs(folder: Path) -> dict[str, bytes]:
    """Generated files below `folder` and their content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.name.endswith(GENERATED_MARKS)
    }


def test_committed_stubs_are_fresh(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts" / "gen_protos.py"), "--check", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    fresh, committed = stubs(tmp_path), stubs(PROTOS)
    assert sorted(committed) == sorted(fresh)
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert stale == [], "run `make protos`"
    assert len(fresh) == 4 * len(list(PROTOS.rglob("*.proto")))


def test_the_protocol_keeps_its_style(tmp_path: Path):
    files = compile_protos(PROTOS, tmp_path)
    assert len(files.file) >= 3
    assert lint(files) == []


GOOD = """syntax = "proto3";
package lab.v1;
// A service.
service LabService {
  // An RPC.
  rpc Run(RunRequest) returns (stream RunResponse);
}
// Asks.
message RunRequest {
  // An enum.
  enum HTTPKind {
    // Zero.
    HTTP_KIND_UNSPECIFIED = 0;
    // One.
    HTTP_KIND_ONE = 1;
  }
  // A field.
  optional int32 num_tokens = 1;
  // A choice.
  oneof kind {
    // A member.
    HTTPKind http_kind = 2;
  }
  // A map.
  map<string, int32> sizes = 3;
}
// Answers.
message RunResponse {}
"""


def lint_text(text: str, tmp_path: Path, name: str = "lab/v1/lab.proto") -> list[str]:
    path = tmp_path / "src" / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return lint(compile_protos(tmp_path / "src", tmp_path))


def test_a_good_proto_has_no_offence(tmp_path: Path):
    assert lint_text(GOOD, tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "offence"),
    [
        ("package lab.v1", "package lab", "no version suffix"),
        ("package lab.v1", "package lib.v1", "not in the folder"),
        ("HTTP_KIND_UNSPECIFIED", "HTTP_KIND_NONE", "is zero and not HTTP_KIND_UNSPECIFIED"),
        ("HTTP_KIND_ONE", "ONE", "does not begin with HTTP_KIND_"),
        ("HTTP_KIND_ONE", "HTTP_KIND_One", "is not UPPER_SNAKE_CASE"),
        ("LabService", "Lab", "does not end with Service"),
        ("rpc Run(", "rpc Start(", "uses RunRequest, not StartRequest"),
        ("RunResponse", "Answer", "uses Answer, not RunResponse"),
        ("(stream RunResponse)", "(RunRequest)", "used by several RPCs"),
        ("num_tokens", "numTokens", "is not lower_snake_case"),
        ("oneof kind", "oneof Kind", "RunRequest.Kind is not lower_snake_case"),
        ("RunRequest", "run_request", "run_request is not PascalCase"),
        ("// A service.\n", "", "LabService has no comment"),
        ("// An RPC.\n", "", "LabService.Run has no comment"),
        ("// Asks.\n", "", "RunRequest has no comment"),
        ("// An enum.\n", "", "RunRequest.HTTPKind has no comment"),
        ("// One.\n", "", "HTTP_KIND_ONE has no comment"),
        ("// A field.\n", "", "num_tokens has no comment"),
        ("// A choice.\n", "", "RunRequest.kind has no comment"),
        ("// A member.\n", "", "http_kind has no comment"),
    ],
)
def test_each_rule_finds_its_offence(old: str, new: str, offence: str, tmp_path: Path):
    assert old in GOOD
    assert [line for line in lint_text(GOOD.replace(old, new), tmp_path) if offence in line]


def test_a_file_name_is_lower_snake_case(tmp_path: Path):
    (offence,) = lint_text(GOOD, tmp_path, "lab/v1/Lab.proto")
    assert "file name is not lower_snake_case" in offence
