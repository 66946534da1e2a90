"""`lock_dedup`: a call that is queued or runs is not sent a second time.

`client` decides where a call is sent, `worker` where its message arrives and where its execution
ends. Both ask `marker`, the dedup marker: a lease in Redis that belongs to the call.
"""
