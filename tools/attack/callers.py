"""Who calls a target here: identities, and what they ask for."""

from ssd.v1 import target_pb2 as pb

OTHER, ATTACKER, UNLIMITED = "token-of-the-others", "token-of-the-attacker", "token-without-limits"
TOKEN_FILE = f"""
[[token]]
name = "other"
roles = ["generate"]
token = "{OTHER}"

[[token]]
name = "attacker"
roles = ["generate"]
token = "{ATTACKER}"
limit_requests = 1
limit_prompt_tokens = 100

[[token]]
name = "unlimited"
roles = ["generate"]
token = "{UNLIMITED}"
"""
OTHERS_PROMPTS = 32  # different ones


def others_prompt(number: int) -> str:
    """About 300 tokens, so that it is worth keeping."""
    return f"{number % OTHERS_PROMPTS} secret gardens, and the key to their doors. " * 20


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def request(prompt: str, tokens: int = 8, seed: int = 5) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingOptions(temperature=0.8, seed=seed),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
    )


# Counts, for each message, those before it, as Mistral's templates do; says the last one alone.
SLOW_TEMPLATE = """
{%- for message in messages %}
  {%- set users = messages[:loop.index] | selectattr("role", "equalto", "user") | list | length %}
{%- endfor %}
{{- messages[-1].content }}"""


def chat(contents: list[str], tokens: int = 8) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content=text) for text in contents]
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=messages),
        sampling=pb.SamplingOptions(temperature=0.8, seed=5),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
    )
