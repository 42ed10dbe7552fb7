"""The controller: observe, plan (pure), apply; status, live tuning, rollout."""
