"""Triton's interpreter without what it repeats: kernels are interpreted in half the time."""

from dataclasses import replace
from typing import Any

import pytest

from tests.suite.scale import FULL


def hasten(patch: pytest.MonkeyPatch) -> None:
    """The language is patched once in a launch, not again for each call of a device function.

    That no index overflows is checked by ``make test-full`` alone.
    """
    import triton.language
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=FULL))
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: dict[bool, Any] = {}

    def patch_once(function: Any) -> Any:
        # A kernel's; functions of the library know tl.core, some of them as tl.
        own = function.__globals__.get("tl") is triton.language
        if own not in patched:
            patched[own] = patch_lang(function)
        return patched[own]

    def launch_anew(executor: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(executor, *arguments, **options)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
