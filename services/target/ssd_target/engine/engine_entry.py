"""Where the engine process begins. Importing this does not load torch: the front has no use for it
before the engine is on its way."""

from multiprocessing.connection import Connection

from ssd_engine.process.children import ignore_terminal_signals
from ssd_target.config import EngineOptions


def enter(pipe: Connection, options: EngineOptions) -> None:
    ignore_terminal_signals()
    from ssd_target.engine.engine_process import engine_main

    engine_main(pipe, options)
