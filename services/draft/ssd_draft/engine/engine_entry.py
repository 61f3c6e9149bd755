"""Where the engine process begins. Importing this does not load torch: the front has no use for it
before the engine is on its way."""

from multiprocessing.connection import Connection

from ssd_draft.config import DraftEngineOptions
from ssd_engine.process.children import ignore_terminal_signals


def enter(pipe: Connection, options: DraftEngineOptions) -> None:
    ignore_terminal_signals()
    from ssd_draft.engine.engine_process import engine_main

    engine_main(pipe, options)
