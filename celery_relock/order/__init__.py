"""`lock_order`: calls of one lock name run in the order in which they were sent. The page "Ordered
processing per key" tells how it works and what it costs.

    client.py    where a call is sent: it takes a place in the line of its lock's name
    worker.py    where its message arrives: it waits for its turn, and holds the line to its end
"""
