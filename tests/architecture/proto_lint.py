"""Style of the .proto files: the rules of buf's STANDARD category that matter here, and a comment on everything.

Works on descriptors with source info, so that it sees exactly what protoc sees.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# Field numbers in descriptor.proto: they make up the paths by which source info names an element.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED_MESSAGES, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
_ENUM_VALUES = _METHODS = 2

Path = tuple[int, ...]


def lint(files: FileDescriptorSet) -> list[str]:
    """Every offence in `files`, one line each."""
    offences = [offence for file in files.file for offence in _FileLint(file).offences()]
    used = Counter(
        name
        for file in files.file
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    )
    return offences + [f"{name.lstrip('.')}: used by several RPCs" for name, count in used.items() if count > 1]


class _FileLint:
    """Lints one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[Path, str] = {
            tuple(location.path): location.leading_comments.strip() for location in file.source_code_info.location
        }

    def offences(self) -> Iterator[str]:
        """Offences in the order of the file."""
        file = self._file
        if not re.fullmatch(r"[a-z][a-z0-9_.]*\.v[0-9]+", file.package):
            yield f"{file.name}: package {file.package!r} has no version suffix"
        if file.name.rpartition("/")[0] != file.package.replace(".", "/"):
            yield f"{file.name}: not in the folder of package {file.package!r}"
        if not _LOWER_SNAKE.fullmatch(file.name.rpartition("/")[2].removesuffix(".proto")):
            yield f"{file.name}: file name is not lower_snake_case"
        for index, message in enumerate(file.message_type):
            yield from self._message(message, message.name, (_MESSAGES, index))
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, enum.name, (_ENUMS, index))
        for index, service in enumerate(file.service):
            yield from self._service(service, (_SERVICES, index))

    def _named(self, name: str, path: Path, pattern: re.Pattern[str], style: str) -> Iterator[str]:
        if not pattern.fullmatch(name.rpartition(".")[2]):
            yield f"{self._file.name}: {name} is not {style}"
        if not self._comments.get(path):
            yield f"{self._file.name}: {name} has no comment"

    def _message(self, message: DescriptorProto, name: str, path: Path) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from self._named(name, path, _PASCAL, "PascalCase")
        for index, field in enumerate(message.field):
            yield from self._named(
                f"{name}.{field.name}", (*path, _FIELDS, index), _LOWER_SNAKE, "lower_snake_case"
            )
        synthetic = _synthetic_oneofs(message.field)
        for index, oneof in enumerate(message.oneof_decl):
            if index not in synthetic:
                full_name = f"{name}.{oneof.name}"
                yield from self._named(full_name, (*path, _ONEOFS, index), _LOWER_SNAKE, "lower_snake_case")
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, f"{name}.{nested.name}", (*path, _NESTED_MESSAGES, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUMS, index))

    def _enum(self, enum: EnumDescriptorProto, name: str, path: Path) -> Iterator[str]:
        yield from self._named(name, path, _PASCAL, "PascalCase")
        prefix = _WORD_START.sub("_", enum.name).upper() + "_"
        if enum.options.allow_alias:
            yield f"{self._file.name}: {name} allows aliases"
        for index, value in enumerate(enum.value):
            full_name = f"{name}.{value.name}"
            yield from self._named(full_name, (*path, _ENUM_VALUES, index), _UPPER_SNAKE, "UPPER_SNAKE_CASE")
            if not value.name.startswith(prefix):
                yield f"{self._file.name}: {full_name} does not begin with {prefix}"
            if value.number == 0 and value.name != f"{prefix}UNSPECIFIED":
                yield f"{self._file.name}: {full_name} is zero and not {prefix}UNSPECIFIED"

    def _service(self, service: ServiceDescriptorProto, path: Path) -> Iterator[str]:
        yield from self._named(service.name, path, _PASCAL, "PascalCase")
        if not service.name.endswith("Service"):
            yield f"{self._file.name}: {service.name} does not end with Service"
        for index, method in enumerate(service.method):
            name = f"{service.name}.{method.name}"
            yield from self._named(name, (*path, _METHODS, index), _PASCAL, "PascalCase")
            for type_name, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                short = type_name.rpartition(".")[2]
                if short not in {f"{method.name}{suffix}", f"{service.name}{method.name}{suffix}"}:
                    yield f"{self._file.name}: {name} uses {short}, not {method.name}{suffix}"


def _synthetic_oneofs(fields: Sequence[FieldDescriptorProto]) -> set[int]:
    """Oneofs that protoc makes for `optional` fields; nobody wrote them."""
    return {field.oneof_index for field in fields if field.proto3_optional}
