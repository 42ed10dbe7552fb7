"""What both processes of the operator have: logs, metrics, health, and how they stop."""
