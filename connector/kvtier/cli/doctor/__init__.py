"""``kvtier doctor``: checks of a machine or a pod, each finding with a severity and a remedy."""
