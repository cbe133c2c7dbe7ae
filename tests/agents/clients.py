"""Agents as people write them, on the SDKs and frameworks of requirements/agents.in: clients.py NAME.

Each asks the question of its task, offers one tool, ``add``, and prints a reward of 1 where the answer has
a 3. It finds the task, the address and the key in its environment, and knows nothing of rlgraph.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

QUESTION = json.loads(os.environ["TASK"])["question"]
BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}


def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(int(a + b))


def openai() -> str:
    from openai import OpenAI

    client = OpenAI()
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    message = (
        client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    )
    (call,) = message.tool_calls or ()
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
        return str(stream.get_final_completion().choices[0].message.content)


def openai_responses() -> str:
    from openai import OpenAI

    client = OpenAI()
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    first = client.responses.create(model="policy", input=QUESTION, tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    behind = {"previous_response_id": first.id, "input": result, "tools": tools}
    with client.responses.stream(model="policy", **behind) as stream:
        return str(stream.get_final_response().output_text)


def anthropic_tool_runner() -> str:
    from anthropic import Anthropic, beta_tool

    ask: Any = {"model": "policy", "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}]}
    *_, last = Anthropic().beta.messages.tool_runner(tools=[beta_tool(add)], **ask)
    return str(last.content[-1].text)


def anthropic_stream() -> str:
    from anthropic import Anthropic

    client = Anthropic()
    tools = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    ask: Any = {"model": "policy", "max_tokens": 200, "tools": tools}
    with client.messages.stream(messages=messages, **ask) as stream:
        message = stream.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **ask) as stream:
        return str(stream.get_final_message().content[-1].text)


def openai_agents(api: Any = "responses") -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(name="agent", model="policy", instructions="Be brief.", tools=[function_tool(add)])
    return str(asyncio.run(Runner.run(agent, QUESTION)).final_output)


def openai_agents_chat() -> str:
    return openai_agents("chat_completions")


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    return str(Agent(model, system_prompt="Be brief.", tools=[add]).run_sync(QUESTION).output)


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy", base_url=BASE_URL, api_key=KEY), [add])
    return str(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


def smolagents() -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id="policy", api_base=BASE_URL, api_key=KEY)
    return str(ToolCallingAgent(tools=[tool(add)], model=model, max_steps=3).run(QUESTION))


def litellm() -> str:
    import litellm as client

    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    ask: Any = {"model": "openai/policy", "api_base": BASE_URL, "api_key": KEY, "tools": tools}
    message = client.completion(messages=messages, **ask).choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    return str(client.completion(messages=messages, **ask).choices[0].message.content)


if __name__ == "__main__":
    answer = globals()[sys.argv[1]]()
    print(json.dumps({"reward": float("3" in answer)}))
