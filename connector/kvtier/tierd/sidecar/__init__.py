"""tierd in a container of its own: process 1 there starts it, restarts it and ends it.

If the *container* restarted, the pages of the host pool would stay charged to the pod and not to the new container, whose limit would
guard nothing any more; so nothing that tierd does ends this process. ``docs/sidecar.md`` tells the whole life.
"""
