/* ring_soft.h: rings on softnpu, for tests with real bytes. */
#pragma once
#include "check.h"
#include "ring.h"
#include <poll.h>

enum { PATIENCE_MS = 30000 };

static const ring_driver soft_driver = {
    aclrtSetCurrentContext, aclrtGetCurrentContext, aclrtCreateStreamWithConfig, aclrtDestroyStream, aclrtStreamAbort,
    aclrtSynchronizeStreamWithTimeout, aclrtStreamQuery, aclrtQueryEventStatus, aclrtStreamWaitEvent, aclrtCreateEventExWithFlag, aclrtDestroyEvent,
    aclrtRecordEvent, aclrtSynchronizeEventWithTimeout, ring_copy, aclrtMemcpyAsync, aclGetRecentErrMsg, softnpu_run_here, HcclBatchGet, HcclBatchPut,
    aclrtWaitAndResetNotify, aclrtRecordNotify,
};

static inline ring *open_ring(uint64_t window_bytes, uint64_t inline_bytes, int64_t grace_ms)
{
    ring *r = NULL;
    aclrtContext context;
    ring_options options = { 16, window_bytes, inline_bytes, grace_ms, 0, 60000, 0, 0, 0, 0 };
    CHECK_OK(aclrtGetCurrentContext(&context));
    CHECK_OK(ring_open(&soft_driver, context, &options, &r));
    if (!r)
        abort();
    return r;
}

static inline void close_ring(ring *r)
{
    CHECK_EQ(ring_close(r, PATIENCE_MS), 0);
    ring_free(r);
}

/* A wake may have nothing to tell: a layer's news can be reaped before its signal is written. */
static inline ring_completion next_completion(ring *r)
{
    ring_completion done;
    struct pollfd fd = { .fd = ring_fd(r), .events = POLLIN };
    do {
        if (poll(&fd, 1, PATIENCE_MS) != 1) {
            printf("no completion came\n");
            abort();
        }
    } while (ring_reap(r, &done, 1) != 1);
    return done;
}

/* To its end, in this call or not. */
static inline ring_completion run_steps(ring *r, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms)
{
    ring_completion done = { .id = 0 };
    int status = ring_submit(r, id, steps, count, timeout_ms, &done);
    if (status == RING_QUEUED)
        return next_completion(r);
    CHECK_EQ(status, RING_RAN);
    return done;
}

#define CHECK_DONE(got, want_id, want_state, want_bytes) do { ring_completion done_ = (got); CHECK_EQ(done_.id, want_id); \
        CHECK_EQ(done_.state, want_state); CHECK_EQ(done_.bytes, want_bytes); \
        if (done_.state != (want_state)) printf("  code %d: %s\n", done_.code, done_.message); } while (0)

/* One range in one piece. */
typedef struct single { ring_step step; uint64_t local, remote, index; } single;
static inline const ring_step *one_range(single *s, int op, int kind, void *local, const void *remote, uint64_t bytes)
{
    s->local = (uint64_t)local;
    s->remote = (uint64_t)remote;
    s->index = 0;
    s->step = (ring_step){ .op = op, .kind = kind, .grid = { &s->local, &s->remote, &s->index, &s->index, 1, 1, bytes, bytes, bytes, bytes } };
    return &s->step;
}
