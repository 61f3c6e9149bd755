"""Links to speculation endpoints: where they are, and what is said on them."""
