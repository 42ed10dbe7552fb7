"""The fault scorecard: a real tier daemon on storage that is made to misbehave, measured against what KVTier promises."""
