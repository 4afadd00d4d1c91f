"""A harness of the library verifiers that chats within this process.

The library's own chat program (its harness `null`) is a new Python process for each turn of an
episode. This harness sends the same requests to the same interception server, without a process.
It calls the tools of a taskset's MCP servers, and ends when the policy calls no tool.
"""

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

NAME = "gspo-chat"
MODULE = "gspo_chat"  # the module in which the library looks for a harness of this name
__all__ = ["ChatHarness"]


class ChatConfig(vf.HarnessConfig):
    """The settings of the harness, which are those of every harness."""


class ChatHarness(vf.Harness[ChatConfig]):
    """A chat loop in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play a segment: request turns until the policy calls no tool."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            )
            tools, tool_servers, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages}
            if tools:
                body["tools"] = tools
            calls = await self._turn(session, endpoint, secret, body)
            while calls:
                for call in calls:
                    content = await call_tool(call, tool_servers, connections)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )
                calls = await self._turn(session, endpoint, secret, body)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _turn(
        self, session: aiohttp.ClientSession, endpoint: str, secret: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Request a turn, append it to the messages of `body`, and return its calls of tools."""
        async with session.post(
            f"{endpoint}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {secret}"},
        ) as response:
            if response.status != 200:
                raise vf.HarnessError(f"no turn: {(await response.text())[:300]}")
            completion = await response.json()
        message = completion["choices"][0]["message"]
        body["messages"].append(message)
        return message.get("tool_calls") or []


async def call_tool(call: dict[str, Any], tool_servers: Any, connections: Any) -> Any:
    """Return the answer of a tool, or the reason why the policy's call is invalid."""
    name = call["function"]["name"]
    if name not in tool_servers:
        return f"error: unknown tool {name!r}"
    arguments = json.loads(call["function"]["arguments"])
    return await call_mcp(connections, tool_servers, name, arguments)


def register() -> None:
    """Let the library find the harness: it imports a harness as a module of its name."""
    sys.modules[MODULE] = sys.modules[__name__]
