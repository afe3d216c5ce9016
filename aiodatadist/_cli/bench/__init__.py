"""``aiodatadist bench``: how fast a KV cache travels here, beside what the memory itself can do.

There are two ends. The *owner* (``--role prefill``) listens and has a cache. The *initiator* (``--role decode --peer``)
tells it which cache to allocate, moves blocks, and measures. ``--role both`` starts the owner as a child. They
communicate by notifications, over the link that they measure.

    sizes        the bytes that "64KiB" stands for
    workload     one row of the report, as a value: which blocks travel, and what they hold
    caches       the memory of one end
    messages     the messages between the two ends
    owner        the end that answers
    initiator    the end that measures
    figures      samples to rows
    lateness     how late the event loop is during a run
    machine      the versions and the machine of a run
    against/     other libraries, in turns
    report       rows as a table, and as JSON
    compare      two reports
    targets      a check that the files can be written
    command      the two roles, and all together
"""
