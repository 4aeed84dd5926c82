"""Reads a tokenizer bundle: the zip archive by which a worker gives the scheduler its model's tokenizer.

Entries: tokenizer.json (required), bundle.json (required), chat_template.jinja (optional). bundle.json holds
bos_token, eos_token, unk_token, pad_token (strings), bos_token_id, eos_token_ids, add_bos_token and
generation_defaults; each may be missing or null. Other entries and other keys are ignored: a newer worker may
add some.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from types import MappingProxyType
from typing import Final, TypeGuard, cast

from tokenizers import Tokenizer

from stepahead.scheduler.text.chat_template import ChatTemplate
from stepahead.scheduler.text.codec import CodecSettings, TextCodec
from stepahead.scheduler.text.errors import BundleError

MAX_ENTRIES: Final = 50
MAX_UNPACKED_BYTES: Final = 500 * 2**20
_ENCRYPTED_FLAG: Final = 0x1


def load_bundle(data: bytes, sha256: str | None) -> TextCodec:
    """Reads a bundle.

    Args:
        data: The whole zip archive.
        sha256: Expected SHA-256 of `data`, hex; None skips the check.

    Raises:
        BundleError: Wrong digest, damaged or oversized archive, missing entry, or an unusable tokenizer.
    """
    if sha256 is not None:
        actual = hashlib.sha256(data).hexdigest()
        if actual != sha256.lower():
            raise BundleError(f"tokenizer bundle: sha256 is {actual}, expected {sha256.lower()}")
    entries = _read_entries(data)
    for name in ("tokenizer.json", "bundle.json"):
        if name not in entries:
            raise BundleError(f"tokenizer bundle: {name} is missing")
    try:
        tokenizer = Tokenizer.from_buffer(entries["tokenizer.json"])
    except ValueError as error:
        raise BundleError(f"tokenizer.json: {error}") from error
    fields = _BundleFields(entries["bundle.json"])
    template = entries.get("chat_template.jinja")
    return TextCodec(
        tokenizer,
        settings=fields.settings(),
        chat_template=None if template is None else _compile(template, fields.special_tokens()),
    )


def _read_entries(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            _check_limits(infos)
            # zipfile never reads more of an entry than its header says; the checksum tells if it lied.
            return {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise BundleError(f"tokenizer bundle: damaged archive: {error}") from error


def _check_limits(infos: list[zipfile.ZipInfo]) -> None:
    if len(infos) > MAX_ENTRIES:
        raise BundleError(f"tokenizer bundle: {len(infos)} entries, at most {MAX_ENTRIES}")
    unpacked_bytes = sum(info.file_size for info in infos)
    if unpacked_bytes > MAX_UNPACKED_BYTES:
        raise BundleError(f"tokenizer bundle: {unpacked_bytes} bytes unpacked, at most {MAX_UNPACKED_BYTES}")
    names: set[str] = set()
    for info in infos:
        name = info.filename
        if not name or name in {".", ".."} or any(char in name for char in "/\\:\0"):
            raise BundleError(f"tokenizer bundle: entry {name!r} is not a plain file name")
        if name in names:
            raise BundleError(f"tokenizer bundle: entry {name!r} occurs twice")
        if info.flag_bits & _ENCRYPTED_FLAG:
            raise BundleError(f"tokenizer bundle: entry {name!r} is encrypted")
        names.add(name)


def _compile(template: bytes, special_tokens: dict[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(template.decode("utf-8"), special_tokens)
    except UnicodeDecodeError as error:
        raise BundleError(f"chat_template.jinja: {error}") from error


class _BundleFields:
    """bundle.json with checked types."""

    __slots__ = ("_fields",)

    def __init__(self, text: bytes) -> None:
        try:
            document: object = json.loads(text)
        except ValueError as error:
            raise BundleError(f"bundle.json: {error}") from error
        if not _is_object(document):
            raise BundleError("bundle.json: not an object")
        self._fields = document

    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use."""
        tokens: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self._fields.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise BundleError(f"bundle.json: {name} is not a string")
            tokens[name] = value
        return tokens

    def settings(self) -> CodecSettings:
        """Everything but the special tokens' texts."""
        bos_id = self._fields.get("bos_token_id")
        eos_ids = self._get("eos_token_ids", [])
        add_bos = self._get("add_bos_token", default=False)
        defaults = self._get("generation_defaults", {})
        if bos_id is not None and not _is_token_id(bos_id):
            raise BundleError("bundle.json: bos_token_id is not a token id")
        if not _is_list(eos_ids) or not all(map(_is_token_id, eos_ids)):
            raise BundleError("bundle.json: eos_token_ids is not a list of token ids")
        if not isinstance(add_bos, bool):
            raise BundleError("bundle.json: add_bos_token is not a boolean")
        if not _is_object(defaults):
            raise BundleError("bundle.json: generation_defaults is not an object")
        return CodecSettings(
            bos_token_id=cast("int | None", bos_id),
            eos_token_ids=tuple(cast("list[int]", eos_ids)),
            add_bos_token=add_bos,
            generation_defaults=MappingProxyType(defaults),
        )

    def _get(self, name: str, default: object) -> object:
        value = self._fields.get(name)
        return default if value is None else value


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
