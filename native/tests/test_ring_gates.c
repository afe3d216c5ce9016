/* Gates: each has a time limit of its own, and what travels behind them has the program's. */
#include "ring_kit.h"

enum { LAYERS = 3, DAY_MS = 86400000, SHORT_MS = 50 };
typedef struct gated {
    ring_step step;
    ring_layers layers;
    uint64_t local[LAYERS], remote[LAYERS], index;
    fake_event gates[LAYERS];
    aclrtNotify handles[LAYERS];
} gated;

/* A notify is an event whose record is still to come. */
static aclError wait_notify(aclrtNotify notify, aclrtStream stream, uint32_t ms)
{
    (void)ms;
    return fake_wait_event(stream, notify);
}

static aclError record_notify(aclrtNotify notify, aclrtStream stream)
{
    (void)notify, (void)stream;
    return ACL_SUCCESS;
}

static ring *open_gated(void)
{
    ring_driver driver = fake_driver;
    ring_options options = { 4, 1 << 20, 0, PATIENCE_MS, 0, PATIENCE_MS, 0, 0, 0, 0 };
    ring *r = NULL;
    driver.wait_notify = wait_notify;
    driver.record_notify = record_notify;
    CHECK_EQ(ring_open(&driver, HOME, &options, &r), 0);
    return r;
}

/* Layers of one range of 100 bytes, behind shut gates. */
static void set_gated(gated *s, uint32_t group, int64_t gate_ms)
{
    *s = (gated){ .layers = { .tensors = 1, .group = group, .gates = s->handles, .gate_ms = gate_ms } };
    for (uint32_t i = 0; i < LAYERS; i++) {
        s->local[i] = 0x100000000000 + i * 0x1000;
        s->remote[i] = (1ull << 32) + i * 0x1000;
        s->gates[i] = (fake_event){ 1, 0 };
        s->handles[i] = &s->gates[i];
    }
    s->step = (ring_step){ .op = RING_COPY, .kind = ACL_MEMCPY_DEVICE_TO_DEVICE, .layers = &s->layers, .grid = {
        .local = s->local, .remote = s->remote, .local_index = &s->index, .remote_index = &s->index,
        .tensors = LAYERS, .blocks = 1, .local_stride = 100, .remote_stride = 100, .bytes = 100, .tail = 100 } };
}

static int submit_gated(ring *r, const gated *s, int64_t timeout_ms)
{
    ring_completion unused;
    return ring_submit(r, 1, &s->step, 1, timeout_ms, &unused);
}

TEST(test_a_gate_that_stays_shut_has_its_own_limit_however_many_travel_together)
{
    for (uint32_t group = 1; group <= LAYERS; group++)
        for (uint32_t open = 0; open < LAYERS; open++) {
            fake_reset();
            ring *r = open_gated();
            gated s;
            set_gated(&s, group, SHORT_MS);
            for (uint32_t i = 0; i < open; i++)
                fake_happen(&s.gates[i]);
            CHECK_EQ(submit_gated(r, &s, DAY_MS), RING_QUEUED);
            ring_completion done = next_completion(r);      /* long before the program's own limit */
            CHECK_EQ(done.state, RING_TIMED_OUT);
            CHECK_EQ(done.gate, open + 1);
            CHECK_EQ(done.bytes, open / group * group * 100);
            CHECK_EQ(fake_calls(ABORT), 1);
            close_ring(r);
        }
}

TEST(test_time_at_a_gate_is_none_of_the_program)
{
    fake_reset();
    ring *r = open_gated();
    gated s;
    set_gated(&s, 2, DAY_MS);
    CHECK_EQ(submit_gated(r, &s, 200), RING_QUEUED);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct timespec longer = { 0, 250000000 };
        nanosleep(&longer, NULL);                           /* than the program's limit */
        fake_happen(&s.gates[i]);
    }
    ring_completion done = next_completion(r);
    CHECK_DONE(done, 1, RING_DONE, 100 * LAYERS, LAYERS);
    CHECK_EQ(done.gate, 0);
    close_ring(r);
}

TEST(test_what_is_behind_an_open_gate_has_the_limit_of_the_program)
{
    fake_reset();
    fake_hold();
    ring *r = open_gated();
    gated s;
    set_gated(&s, 1, DAY_MS);
    fake_happen(&s.gates[0]);
    fake_let(2);                                            /* the wait for the gate, and the event behind it */
    CHECK_EQ(submit_gated(r, &s, SHORT_MS), RING_QUEUED);
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    CHECK_EQ(done.gate, 0);
    CHECK_EQ(done.bytes, 0);
    close_ring(r);
}

TEST(test_a_program_is_cancelled_at_each_of_its_gates)
{
    for (uint32_t open = 0; open < LAYERS; open++) {
        fake_reset();
        ring *r = open_gated();
        gated s;
        set_gated(&s, LAYERS, DAY_MS);
        for (uint32_t i = 0; i < open; i++)
            fake_happen(&s.gates[i]);
        CHECK_EQ(submit_gated(r, &s, DAY_MS), RING_QUEUED);
        fake_reached(WAIT_EVENT, open + 1);
        CHECK_EQ(ring_cancel(r, 1), 1);
        for (uint32_t i = open; i < LAYERS; i++)
            fake_happen(&s.gates[i]);                       /* too late, or just in time: it ends, and nothing is left */
        int state = next_completion(r).state;
        CHECK(state == RING_CANCELLED || state == RING_DONE);
        close_ring(r);
    }
}

TEST(test_gates_without_a_limit_are_refused)
{
    fake_reset();
    ring *r = open_gated();
    gated s;
    set_gated(&s, 1, 0);
    CHECK_EQ(submit_gated(r, &s, 1000), RING_INVALID);
    close_ring(r);
}

int main(void)
{
    RUN(test_a_gate_that_stays_shut_has_its_own_limit_however_many_travel_together);
    RUN(test_time_at_a_gate_is_none_of_the_program);
    RUN(test_what_is_behind_an_open_gate_has_the_limit_of_the_program);
    RUN(test_a_program_is_cancelled_at_each_of_its_gates);
    RUN(test_gates_without_a_limit_are_refused);
    return check_done();
}
