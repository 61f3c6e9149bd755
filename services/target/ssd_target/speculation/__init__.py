"""Where the speculation of a round comes from: branches of endpoints, a look-up, a draft model."""
