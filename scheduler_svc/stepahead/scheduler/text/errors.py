"""Errors of the text package.

TextError
 +-- BundleError        the tokenizer bundle is damaged, oversized or uses something unsupported
 +-- EncodeError        a text cannot be tokenized
 +-- ChatTemplateError  a conversation cannot be rendered with the model's template
 +-- DetokenizeError    a token id cannot be decoded; ends one choice, never more (rule K8)
"""

from __future__ import annotations


class TextError(Exception):
    """Base of every error this package raises on bad input. The message may be shown to a client."""


class BundleError(TextError):
    """The tokenizer bundle cannot be used."""


class EncodeError(TextError):
    """A text cannot be turned into token ids."""


class ChatTemplateError(TextError):
    """A conversation cannot be turned into a prompt."""


class DetokenizeError(TextError):
    """A token id cannot be turned into text."""
