"""The webhook's certificate: issued, rotated by the controller, served by the webhook."""
