"""What nodes say to each other: proof of the secret, setup, steps, and the store of ranks."""
