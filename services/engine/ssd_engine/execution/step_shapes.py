"""Which step shapes a server captures."""

from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.kernels.products.streamed_products import WIDTHS

LEAST_ROWS = 8  # the kernels work on rows in eights


def step_shapes(options: RunnerOptions) -> list[StepShape]:
    """Smallest first: the first one that fits is taken.

    Without trees, one for each number of rows that products are compiled for, plain and
    speculating. With trees, for every power of two of sequences.
    """
    if not options.step_rows:
        return []
    if options.branches:
        shapes = {
            shape
            for runs in _powers(options)
            for shape in _for_runs(options, runs)
            if shape.rows <= options.max_forward_tokens
        }
    else:
        shapes = {
            _shape(options, min(width // rows, options.max_num_seqs), rows)
            for width in _widths(options)
            for rows in (1, options.step_rows)
            if width >= rows
        }
    return sorted(shapes, key=lambda shape: (shape.rows, shape.runs, shape.rows_per_run))


def _for_runs(options: RunnerOptions, runs: int) -> list[StepShape]:
    deep = options.step_rows
    # One depth of trees; the first one may have tokens before it that are new.
    wide = max(options.branches, deep)
    tree = _shape(options, runs, wide)
    first = _shape(options, 2 * runs, wide, rows=runs * (wide + LEAST_ROWS))
    return [_shape(options, runs, deep), tree, first]


def _shape(
    options: RunnerOptions, runs: int, rows_per_run: int, rows: int | None = None
) -> StepShape:
    rows = rows or runs * rows_per_run
    return StepShape(
        rows=-(-rows // LEAST_ROWS) * LEAST_ROWS,
        runs=runs,
        rows_per_run=rows_per_run,
        max_positions=options.max_model_len,
        block_size=options.block_size,
        scratch=options.max_tail if options.branches else 0,
        moves=runs * (options.step_rows + 1) if options.branches else 0,
        path=options.max_path,
    )


def _widths(options: RunnerOptions) -> list[int]:
    """Up to all sequences at their deepest."""
    most = options.max_num_seqs * options.step_rows
    widths = list(WIDTHS)
    while widths[-1] < most:
        widths.append(2 * widths[-1])
    return widths[: next(i for i, width in enumerate(widths) if width >= most) + 1]


def _powers(options: RunnerOptions) -> list[int]:
    powers = [1]
    while powers[-1] < options.max_num_seqs:
        powers.append(min(2 * powers[-1], options.max_num_seqs))
    return powers
