"""The tokenizer bundle: a zip archive a scheduler can use without torch and without the model's folder.

    tokenizer.json       for the `tokenizers` library
    chat_template.jinja  if the model has one
    bundle.json          special tokens and generation defaults, see `BundleFields`

Bytes are deterministic: the same model gives the same archive, so its digest can be compared.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip archive can state


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFields:
    """Content of `bundle.json`."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos_token: bool = False
    """Whether encoding with special tokens begins with the begin-of-sequence token."""
    generation_defaults: dict[str, float | int] = field(default_factory=dict[str, float | int])
    """temperature, top_p and top_k as the model's authors recommend them, where they do."""


def write_bundle(tokenizer_json: str, fields: BundleFields, chat_template: str | None = None) -> bytes:
    """Returns the archive's bytes."""
    members = {"bundle.json": json.dumps(asdict(fields), sort_keys=True), "tokenizer.json": tokenizer_json}
    if chat_template is not None:
        members["chat_template.jinja"] = chat_template
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in sorted(members.items()):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text.encode())
    return buffer.getvalue()
