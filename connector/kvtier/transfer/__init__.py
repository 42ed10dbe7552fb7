"""Moving KV between the engine's memory and the host pool: byte layout, copy engines, proof at start."""
