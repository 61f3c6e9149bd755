"""A loaded model that runs: the runner, captured steps, graphs, and how memory is divided."""
