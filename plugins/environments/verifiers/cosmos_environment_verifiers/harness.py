"""A harness of verifiers that asks the model and its tools in turn, in this process; verifiers imports it."""

import json
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

import openai.resources  # noqa: F401 - a client would import it within the event loop, for seconds
import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

_TLS: Final = ssl.create_default_context()  # each client would load the certificates again
_LIMITS: Final = ("context_length_exceeded", "max_turns")
"""Codes of the errors with which the endpoint refuses a call beyond a limit of the session."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc] # verifiers is an extra
    """Calls the model, and the tools that it calls, until it calls none."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, *given: Any) -> Any:
        """Hold the conversation; one that meets a limit of the session has come to its end, and is scored."""
        ctx, trace, _, endpoint, secret, mcp_urls, data = given
        system, prompt = self.resolve_prompt(data)
        told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages = [*([{"role": "system", "content": system}] if system else []), *told]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        http = DefaultAsyncHttpxClient(verify=_TLS)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None, http_client=http)
        async with client, AsyncExitStack() as stack:
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            asked: dict[str, Any] = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            try:
                while True:
                    said = (await client.chat.completions.create(**asked)).choices[0].message
                    messages.append(said.model_dump(exclude_none=True))
                    for call in said.tool_calls or ():
                        content = await _done(call.function, names, connections)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                    if not said.tool_calls:
                        break
            except BadRequestError as error:
                if not any(limit in str(error) for limit in _LIMITS):
                    raise
                trace.stop("max_turns")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _done(call: Any, names: Mapping[str, Any], connections: Any) -> Any:
    """The result of a call of a tool, or what is wrong with the call."""
    if call.name not in names:
        return f"error: there is no tool {call.name!r}, but {', '.join(names) or 'none'}"
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments are no JSON object but {call.arguments:.80}"
    return await call_mcp(connections, names, call.name, arguments)
