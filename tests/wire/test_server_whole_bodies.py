"""Whole replies, lists and counts are exactly of the types of the official clients."""

from __future__ import annotations

from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import orjson
import pytest
from google.genai import types
from pydantic import TypeAdapter
from test_server_cuts_by_clients import ENVELOPE, REPLIES

from insitu.gateway.server import DIALECTS
from insitu.types import Reply

WHOLE: dict[str, Any] = {
    "chat": openai.types.chat.ChatCompletion,
    "anthropic": anthropic.types.Message,
    "responses": openai.types.responses.Response,
    "gemini": types.GenerateContentResponse,
}
MODEL: dict[str, Any] = {
    "chat": openai.types.Model,
    "anthropic": anthropic.types.ModelInfo,
    "responses": openai.types.Model,
}
"""The Google client renames fields before it looks: its own test asks it over HTTP."""
COUNT: dict[str, Any] = {
    "anthropic": anthropic.types.MessageTokensCount,
    "responses": openai.types.responses.InputTokenCountResponse,
}


def decoded(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


@pytest.mark.parametrize("said", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_whole_reply_is_of_its_type(name: str, said: Reply) -> None:
    body = decoded(DIALECTS[name].reply(said, ENVELOPE))
    TypeAdapter(WHOLE[name]).validate_python(body)


@pytest.mark.parametrize("name", MODEL)
def test_models_and_counts_are_of_their_types(name: str) -> None:
    dialect = DIALECTS[name]
    TypeAdapter(MODEL[name]).validate_python(decoded(dialect.model("policy")))
    assert decoded(dialect.models("policy"))["data"] == [decoded(dialect.model("policy"))]
    if name in COUNT:
        TypeAdapter(COUNT[name]).validate_python(decoded(dialect.count(3)))
