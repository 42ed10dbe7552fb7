"""Builds the container images. ``tools/images`` is the command, ``docs/images.md`` describes it."""
