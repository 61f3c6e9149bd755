"""The front process: links of targets, frames, and the engine's pipe."""
