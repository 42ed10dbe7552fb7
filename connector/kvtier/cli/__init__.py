"""The ``kvtier`` command and the demo.

``app`` declares the commands and their options. Each command has a module with the same three
parts: a function that computes a result, ``to_json`` for programs and ``show`` for people. Only
``app``, ``console`` and the ``show`` functions need typer and rich.
"""
