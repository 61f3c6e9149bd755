"""The paged KV cache: blocks, who owns them, and copies to the host's memory."""
