"""The token ids of a prompt that was given as text, for its log probabilities.

A stream names the tokens it makes, not those of the prompt: whoever sent text asks the server's tokenizer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from stepahead.client import AsyncClient, ChatTurn, Client, Completion, Prompt


def with_prompt_tokens(client: Client, prompt: Prompt, completion: Completion) -> Completion:
    """The completion, with the ids of the prompt's tokens where it has log probabilities of them.

    Raises:
        StepaheadError: the server did not tokenize the prompt.
    """
    return _named(completion, client.tokenize(_text(prompt))) if _lacks_ids(completion) else completion


async def with_prompt_tokens_async(client: AsyncClient, prompt: Prompt, completion: Completion) -> Completion:
    """As `with_prompt_tokens`."""
    return _named(completion, await client.tokenize(_text(prompt))) if _lacks_ids(completion) else completion


def _lacks_ids(completion: Completion) -> bool:
    return any(each is not None and each.token_id is None for each in completion.prompt_logprobs)


def _text(prompt: Prompt) -> str | Sequence[ChatTurn]:
    # The ids of a prompt that was given as ids are known.
    return cast("str | Sequence[ChatTurn]", prompt)


def _named(completion: Completion, token_ids: Sequence[int]) -> Completion:
    entries = completion.prompt_logprobs
    if len(token_ids) != len(entries):
        # Another tokenizer answered than the one that was used: no id is better than a wrong one.
        return completion
    named = tuple(
        None if each is None else replace(each, token_id=token_id)
        for each, token_id in zip(entries, token_ids, strict=True)
    )
    return replace(completion, prompt_logprobs=named)
