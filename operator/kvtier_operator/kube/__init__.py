"""Access to the Kubernetes API: calls, watches, listers and leader election."""
