"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.server.chat import encode_chat, template_tools
from cairn.server.errors import about
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from cairn.server.request_body import encoded, read_request, run_inline_if_short, tokenizer_of
from cairn.server.state import ServerState


async def tokenize(request: Request) -> Response:
    """POST /tokenize. Raises BadRequest for an invalid prompt or conversation."""
    state: ServerState = request.app.state.server
    body = await read_request(request, TokenizeRequest)
    tokenizer = tokenizer_of(state, "/tokenize")

    prompt, special = body.prompt, body.add_special_tokens is not False
    if prompt is None:
        chat = await encode_chat(request, tokenizer, body, template_tools(body.tools or []))
        ids = list(chat.ids)
    else:
        with about("prompt"):
            ids = await encoded(request, lambda: tokenizer.encode(prompt, special))

    def answer() -> bytes:
        texts = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else UNSET
        length = state.client.info.max_model_len
        return msgspec.json.encode(TokenizeResponse(len(ids), length, ids, texts))

    answer_body = await run_inline_if_short(len(ids), answer)
    return Response(answer_body, media_type="application/json")


async def detokenize(request: Request) -> Response:
    """POST /detokenize. Raises BadRequest for an id outside the vocabulary."""
    state: ServerState = request.app.state.server
    body = await read_request(request, DetokenizeRequest)
    tokenizer = tokenizer_of(state, "/detokenize")
    vocab = state.client.info.vocab_size
    bad = next((token for token in body.tokens if token >= vocab), None)
    if bad is not None:
        raise BadField("tokens", f"{bad} is not a token id", f"Ids go from 0 to {vocab - 1}")
    text = await encoded(request, lambda: tokenizer.decode(body.tokens))
    answer_body = msgspec.json.encode(DetokenizeResponse(text))
    return Response(answer_body, media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info, for lm-eval's remote tokenizer. Raises BadRequest without a
    tokenizer."""
    state: ServerState = request.app.state.server
    tokenizer = tokenizer_of(state, "/tokenizer_info")
    info = TokenizerInfo(
        tokenizer_class=tokenizer.kind,
        **tokenizer.named_tokens,
        chat_template=tokenizer.chat_template,
        model_max_length=state.client.info.max_model_len,
    )
    return Response(msgspec.json.encode(info), media_type="application/json")


routes = [
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
