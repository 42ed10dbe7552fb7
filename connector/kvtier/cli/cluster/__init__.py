"""Commands that read a cluster: ``top``, ``why``, ``plan`` and ``doctor POD``.

They decide nothing themselves: ``why`` calls what the webhook calls, ``plan`` what the controller
calls, and ``top`` reads the reports that the controller reads. None of them writes to the cluster.
"""
