/* counters.c: counts live objects and finished work. */
#include "runtime.h"

soft_counts soft_count;

static uint64_t now(const _Atomic uint64_t *counter)
{
    /* relaxed: each count is right by itself; together they are no snapshot */
    return atomic_load_explicit(counter, memory_order_relaxed);
}

aclError soft_count_timeout(aclError code)
{
    if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT || code == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT)
        SOFT_COUNT(sync_timeouts, 1);
    return code;
}

void softnpu_get_counters(softnpu_counters *out)
{
    if (!out)
        return;
    if (atomic_load_explicit(&soft_gate, memory_order_relaxed) & SOFT_GATE_FORKED) {
        *out = (softnpu_counters){ .streams = 0 };          /* locks cannot be trusted after a fork; and nothing of it is the child's */
        return;
    }
    *out = (softnpu_counters){
        .device_bytes = now(&soft_count.device_bytes),
        .pinned_bytes = now(&soft_count.pinned_bytes),
        .allocations = now(&soft_count.allocations),
        .adopted = now(&soft_count.adopted),
        .imported = now(&soft_count.imported),
        .streams = soft_handle_count(SOFT_STREAM),
        .events = soft_handle_count(SOFT_EVENT),
        .contexts = soft_handle_count(SOFT_CONTEXT),
        .comms = soft_handle_count(SOFT_COMM),
        .threads = now(&soft_count.threads),
        .tasks_inline = now(&soft_count.tasks_inline),
        .tasks_queued = now(&soft_count.tasks_queued),
        .bytes_copied = now(&soft_count.bytes_copied),
        .sync_timeouts = now(&soft_count.sync_timeouts),
        .races = now(&soft_count.races),
    };
}
