"""The clients: where they come from, and the versions that are taken."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Client:
    """A client with an environment of its own, as some need versions that others refuse."""

    name: str
    script: str  # a file of scripts/: Python, or JavaScript for Node
    packages: tuple[str, ...]  # the one that is tried comes first
    why: str  # it is tried

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script

    @property
    def is_python(self) -> bool:
        return self.script.endswith(".py")


# Within a major version: what the next one breaks is read before it is allowed. Of openai and ai
# for Node there are two: npm takes the one that fits the Node that is there, 20 or 22.
CLIENTS = (
    Client(
        "openai",
        "openai_sdk.py",
        ("openai>=3.40,<4",),
        "OpenAI's own; most others stand on it",
    ),
    Client(
        "langchain",
        "langchain_chat.py",
        ("langchain-openai>=1.7,<2",),
        "chains and agents; knows context errors by their words",
    ),
    Client(
        "litellm",
        "litellm_router.py",
        ("litellm[mcp]>=1.100,<2",),
        "falls back to a longer context by the words of an error; its calls of tools need [mcp]",
    ),
    Client(
        "instructor",
        "instructor_models.py",
        ("instructor>=1.15,<2",),
        "asks for structure in all ways that there are",
    ),
    Client(
        "llama-index",
        "llama_index_llm.py",
        ("llama-index-llms-openai-like>=0.8,<0.9",),
        "looks at what a model can do by itself",
    ),
    Client(
        "pydantic-ai",
        "pydantic_ai_agent.py",
        ("pydantic-ai-slim[openai]>=2.60,<3",),
        "agents: calls go back with their results",
    ),
    Client(
        "openai-node",
        "openai_sdk.mjs",
        ("openai@>=6.40 <8", "zod@>=4.4 <5"),
        "OpenAI's own for Node",
    ),
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        ("@ai-sdk/openai-compatible@>=2.0 <4", "ai@>=6.0 <8", "zod@>=4.4 <5"),
        "Vercel's, in most web applications",
    ),
    Client(
        "guidellm",
        "guidellm_load.py",
        ("guidellm>=0.8,<0.9", "torch>=2.11,<2.14"),
        "a load, with a check of every answer; its transformers take the torch of this project",
    ),
)
