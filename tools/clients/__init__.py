"""Third-party clients, as their registries have them, against a gateway and the shipped pair."""
