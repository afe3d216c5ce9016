"""``aiodatadist bench``: how fast a KV cache travels here, beside what the memory itself can do.

There are two ends. The *owner* (``--role prefill``) listens and has a cache. The *initiator* (``--role decode --peer``)
tells it which cache to allocate, moves blocks, and measures. ``--role both`` starts the owner as a child. They
communicate by notifications, over the link that they measure.

    sizes        what "64KiB" means
    workload     one row of the report, as a value: which blocks travel, and what they hold
    caches       the memory of one end
    messages     what the two ends say to each other
    owner        the end that answers
    initiator    the end that measures
    figures      samples to rows
    lateness     how late the event loop is meanwhile
    machine      what ran, and on what
    against/     other libraries, in turns
    report       rows as a table, and as JSON
    compare      two reports
    targets      can the files be written?
    command      the two roles, and all together
"""
