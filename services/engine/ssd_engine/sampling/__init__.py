"""Noise, sampling options, the sampler and rejection, each defined once for all devices."""
