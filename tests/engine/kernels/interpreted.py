"""Triton's interpreter without what it repeats: kernels are interpreted in a third of the time."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.suite.scale import FULL


def hasten(patch: pytest.MonkeyPatch) -> None:
    """The language is patched once in a launch, not again for each call of a device function.
    Types and shapes, of which there are few, are made once.

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
    patch.setattr(interpreter, "_get_np_dtype", cache(interpreter._get_np_dtype))
    _make_types_once(patch)


def _make_types_once(patch: pytest.MonkeyPatch) -> None:
    from triton.language import core

    for kind in (core.block_type, core.pointer_type):
        patch.setattr(kind, "__hash__", lambda type: hash(type.name))

    with_element_type = cache(lambda shape, scalar: core.block_type(scalar, list(shape)))

    @cache
    def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        shape = tuple(type.shape) if type.is_block() else ()
        tensor.numel, tensor.shape = sizes_of(shape)

    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(
        core.block_type,
        "with_element_ty",
        lambda block, scalar: with_element_type(tuple(block.shape), scalar),
    )
