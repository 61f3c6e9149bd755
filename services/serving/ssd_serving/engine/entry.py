"""Where an engine process begins. The front names the engine's module, and never imports it: torch
takes seconds to load, and the front has no use for it."""

import importlib
from multiprocessing.connection import Connection
from typing import Any


def enter(module: str, pipe: Connection, options: Any) -> None:
    importlib.import_module(module).engine_main(pipe, options)
