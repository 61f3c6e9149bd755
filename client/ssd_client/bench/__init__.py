"""`ssd-client bench`: the modes of speculation side by side, on the same prompts and seeds."""
