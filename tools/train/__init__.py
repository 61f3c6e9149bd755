"""How the shipped pair of models (stories-target, stories-draft) was made. See README.md."""
