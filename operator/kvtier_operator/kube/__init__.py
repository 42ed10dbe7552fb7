"""The API server as the controller and the webhook see it: a client, and caches that watches keep true."""
